"""The configuration of a run: its typed schema and the checks of every value. It imports no torch."""
