"""Blind spots: wrong variants of a reference, judged by upstream's own predicate. No candidate code is involved."""
