"""Reports on the folders of a sweep, as pure functions of their files: tables, a page, and results/."""
