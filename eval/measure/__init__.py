"""Programs that make evidence; `kbsub measure NAME` runs them."""
