"""The subcommand `new`: copies the project in src/simbal/cli/project/ under a new name."""

import inspect
import keyword
import re
import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

from simbal.errors import UserError, exit_on_user_error

TEMPLATE = Path(__file__).parent / "project"


def new(argv: list[str]) -> None:
    """Create a project with your own balancing strategy, its config, its test and a sweep.

    Examples:
        simbal new myproject            # the folder myproject, which contains the package myproject
        simbal new papers/myproject
    """
    parser = ArgumentParser(description=inspect.getdoc(new), formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the new folder, which also names the package")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        write_project(args.folder)
        print(f"created {args.folder}; its README.md has the next steps")


def write_project(folder: Path) -> None:
    """Write all files of a new project, or none.

    Raises:
        UserError: the folder has files or cannot be written, or a new package cannot have its name.
    """
    name = folder.absolute().name
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name} cannot be the name of a package: use a-z, 0-9 and _, such as myproject")
    if folder.absolute() == Path.cwd():
        raise UserError(f"{folder} is the current folder: run `simbal new {name}` in the folder above it")
    if find_spec(name) is not None:
        raise UserError(f"a package {name} is already installed: choose another name")
    unfinished = folder.with_name(f".{name}.part")
    try:
        shutil.copytree(TEMPLATE, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
        (unfinished / "NAME").rename(unfinished / name)
        for file in (path for path in unfinished.rglob("*") if path.is_file()):
            file.write_text(file.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
