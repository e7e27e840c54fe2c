"""Print where the page of a sweep is, and open it in a browser; while the sweep runs, the page follows it.

Examples:
    simbal watch default                        # outputs/default
    simbal watch outputs/default --no-open      # on a machine without a browser
"""

import sys
import webbrowser
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from simbal.errors import UserError, exit_on_user_error

OUTPUTS = Path("outputs")
MADE_FROM = ("config.yaml", "metrics.jsonl", "record.json", "analysis/*.json")


def main(argv: list[str]) -> None:
    """Show the page that a command line names."""
    parser = ArgumentParser(prog="simbal watch", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/<name>, which holds one folder per run, or the name alone")
    parser.add_argument("--no-open", action="store_true", help="print the path alone")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        file = page_of(args.folder)
    print(file)
    if not args.no_open and not webbrowser.open(file.as_uri()):
        print("no browser was found: open the file in one", file=sys.stderr)


def page_of(folder: Path) -> Path:
    """Return the path of a folder's page, which is written first if it is missing or older than what it is made from.

    The page of a running sweep is left alone, as the sweep writes it.

    Raises:
        UserError: as `read_table` does.
    """
    from simbal.report.page.live import is_followed

    if not folder.is_dir():
        named = OUTPUTS / folder
        if not named.is_dir():
            raise UserError(f"there is no folder {folder}, and no {named}")
        folder = named
    file = folder.resolve() / "index.html"
    sources = [source for name in MADE_FROM for source in folder.glob(f"*/{name}")]
    newest = max((source.stat().st_mtime_ns for source in sources), default=0)
    if not file.is_file() or (file.stat().st_mtime_ns < newest and not is_followed(file)):
        from simbal.report.page import page
        from simbal.report.report import read_table

        page.write(read_table(folder), folder)
    return file
