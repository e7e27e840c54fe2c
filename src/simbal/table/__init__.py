"""Tables: what the folders of a sweep say, as a pure function of their files; nothing here runs anything."""
