"""x / (mean(|x|)) along dimension 1."""
