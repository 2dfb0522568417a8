"""x / (sqrt(sum(x ** 2))) along dimension 1."""
