"""Analyses, one module each: a function takes the keys of its YAML file and returns a `Result`."""
