"""The command lines of the programs: their help, their checks, and how the programs begin."""
