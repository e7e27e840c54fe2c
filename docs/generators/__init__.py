"""Pages that are made when the site is built: from conf/, the root scripts, definitions and docstrings."""
