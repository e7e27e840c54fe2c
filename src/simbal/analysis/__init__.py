"""Analyses, one file per study: each is a function from the keys of its YAML file to a `Result`."""
