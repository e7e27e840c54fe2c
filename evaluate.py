"""Run analyses of runs, of Hugging Face models, or without a model. Same as `simbal evaluate`."""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # do not import files of this folder as libraries, here and in child processes
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from simbal.cli.evaluate import main

if __name__ == "__main__":
    main(sys.argv[1:])
