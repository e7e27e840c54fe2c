"""Train: `simbal train` in this checkout."""

import os
import sys

# a library's `import evaluate` must not find evaluate.py, here or in a program that this one starts
os.environ["PYTHONSAFEPATH"] = "1"
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from simbal.cli.main import run_program

if __name__ == "__main__":
    run_program("train", sys.argv[1:])
