"""Print the table of a sweep again: `simbal report` in a checkout. The program is src/simbal/cli/report.py."""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # what lies beside a program is no library, nor for the programs that it starts
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from simbal.cli.report import main

if __name__ == "__main__":
    main(sys.argv[1:])
