"""One file per study: a function from the keys of its YAML file to a `Finding`."""
