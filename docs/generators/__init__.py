"""Pages that are made when the site is built: from README.md, conf/, the root scripts, definitions and docstrings."""
