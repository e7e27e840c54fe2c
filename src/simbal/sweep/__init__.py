"""Sweeps: running many jobs, and the table of what they left in their folders; nothing here trains."""
