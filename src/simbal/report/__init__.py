"""Reports on the folders of a sweep, as pure functions of their files: tables and a page."""
