"""Each plane of an image by its own mean and variance, without parameters."""
