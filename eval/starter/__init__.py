"""Writes a first candidate for a task: the reference's own forward, and its last elementwise step as a kernel."""
