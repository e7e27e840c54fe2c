"""A run and its folder: its resolved config, its place, and how it ended."""
