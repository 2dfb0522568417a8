"""What submissions/<task>/ says; the only reader of that folder. Text and data, no torch."""
