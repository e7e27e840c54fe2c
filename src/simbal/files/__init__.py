"""Files and terminals: atomic writes, checked reads, locks, and output without control characters."""
