"""Upstream's own verdict, its words unchanged."""
