"""Print the table of a sweep again, from its run folders alone, and write it beside them.

Examples:
    python report.py outputs/default
    python report.py outputs/default baseline=none
    python report.py outputs/default baseline='simbal coef=0.1'               # an arm as the table names it
    python report.py outputs/default compare=all                              # every two arms
    python report.py outputs/default equivalence_margin=0.01                  # nats per token
    python report.py outputs/default power=true                               # how many more seeds would decide it
    python report.py outputs/default columns=[ppl,min_pes,seu] paper=true     # numbers of analyses, and the paper's
"""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # what lies beside a program is no library, nor for the programs that it starts
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

import gc
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from simbal.errors import exit_on_user_error


def main() -> None:
    """Read the command line and report."""
    gc.disable()  # what a thousand runs leave in memory is no garbage: looking for some is a fifth of the time
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/<name>, which holds one folder per run")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="as above")
    args = parser.parse_args()
    with exit_on_user_error():
        from simbal.report.report import (
            report,  # with all that makes tables, which --help does not pay
            report_keys,
        )

        report(args.folder, **report_keys(args.keys))


if __name__ == "__main__":
    main()
