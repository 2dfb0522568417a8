"""The timing methods, one file each: a module here that has METHODS is registered (register.py)."""
