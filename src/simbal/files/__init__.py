"""Files and terminals: atomic writes, locks and consoles."""
