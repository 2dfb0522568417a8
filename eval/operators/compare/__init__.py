"""What compares two tensors: upstream's predicate, bits, distance to the float64 answer."""
