"""Correctness and time that a candidate cannot write: task, inputs, reference, clock and comparison are elsewhere."""
