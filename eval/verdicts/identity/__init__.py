"""Bit identity with the reference on the same device."""
