"""Result files: their records, reading, writing, merging, manifests. No torch."""
