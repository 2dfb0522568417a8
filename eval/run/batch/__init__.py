"""A folder or corpus of candidates judged as a batch: what its samples are, one row each, here or on a cluster."""
