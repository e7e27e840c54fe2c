"""Pages that are generated when the site is built, from conf/, `--help`, definitions and docstrings."""
