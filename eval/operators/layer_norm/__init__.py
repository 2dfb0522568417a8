"""Layer normalisation: its float64 formula, the reference's order of operations, its faults."""
