"""Prepare data: the same as `simbal prepare`, from this checkout (src/simbal/cli/prepare.py)."""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # files next to a program are not importable, nor for programs that it starts
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from simbal.cli.prepare import main

if __name__ == "__main__":
    main(sys.argv[1:])
