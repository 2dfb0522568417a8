"""The version of this project: the one place that states it (pyproject.toml reads it here)."""

VERSION = "0.1.0"
