"""The command line: subcommands of `simbal`, their help pages and the translation of arguments for Hydra."""
