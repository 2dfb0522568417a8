"""x / (sqrt(mean(x ** 2) + eps)) along dimension 1."""
