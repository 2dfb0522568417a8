"""Timing: plan, parent, child, record, floors, and the comparison of two programs."""
