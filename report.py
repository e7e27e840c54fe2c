"""Print the table of a sweep again, from its run folders alone, and write it beside them.

Examples:
    python report.py outputs/default
    python report.py outputs/default --baseline none
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from simbal.errors import exit_on_user_error
from simbal.sweep.report import report


def main() -> None:
    """Read the command line and report."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/<name>, which holds one folder per run")
    parser.add_argument("--baseline", help="the balancing that differences are taken from; default: the runs' own")
    args = parser.parse_args()
    with exit_on_user_error():
        report(args.folder, args.baseline)


if __name__ == "__main__":
    main()
