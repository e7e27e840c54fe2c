"""Print the table of a sweep again, from its run folders alone, and write it beside them.

Examples:
    python report.py outputs/default
    python report.py outputs/default baseline=none
    python report.py outputs/default baseline='simbal coef=0.1'               # an arm as the table names it
    python report.py outputs/default compare=all                              # every two arms
    python report.py outputs/default equivalence_margin=0.01                  # nats per token
    python report.py outputs/default power=true                               # how many more seeds would decide it
    python report.py outputs/default figures=true                             # SVG and PDF for a paper, and curves.csv
    python report.py outputs/default explain=true                             # with what the numbers mean
    python report.py outputs/default outputs/changed                          # what differs, and a table of both
    python report.py outputs/default columns=[ppl,min_pes,seu] paper=true     # numbers of analyses, and the paper's
"""

import gc
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from simbal.commands import as_typed
from simbal.errors import UserError, exit_on_user_error


def main(argv: list[str]) -> None:
    """Report as a command line asks."""
    gc.disable()  # what a thousand runs leave in memory is no garbage: looking for some is a fifth of the time
    parser = ArgumentParser(description=as_typed(__doc__ or ""), formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="outputs/<name>, which holds one folder per run; or the same at a URL")
    parser.add_argument("more", nargs="*", metavar="key=value", help="as above; or another folder, to compare with")
    args, flags = parser.parse_known_args(argv)
    others = [text for text in args.more if "://" in text or Path(text).is_dir()]
    with exit_on_user_error():
        if flags:
            raise UserError(f"report has no {flags[0]}: its keys, which --help lists, are like baseline=none")
        if len(others) > 1:
            raise UserError(f"report takes one folder or two, not {1 + len(others)}")
        from simbal.report.report import parse_keys, report, report_both  # slow to import, and --help does not need it

        keys = parse_keys([text for text in args.more if text not in others])
        folder = Path(args.folder)
        if others:
            report_both(folder, Path(others[0]), **keys)
        else:
            report(folder, **keys)
