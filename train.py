"""Train one model or a sweep from this checkout; the same program as `simbal train` (src/simbal/cli/train.py)."""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # files next to this program must not shadow libraries, also in child processes
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from simbal.cli.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
