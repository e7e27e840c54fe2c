"""Write JSON Schemas of the configs, by which an editor completes keys, says what they mean and marks mistakes.

Examples:
    simbal schema                   # to the folder schema
    simbal schema .vscode/simbal
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from simbal.errors import UserError, exit_on_user_error
from simbal.files.disk import write_json


def main(argv: list[str]) -> None:
    """Write the schemas to the folder that a command line names."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("schema"), help="where to; schema by default")
    folder = parser.parse_args(argv).folder
    with exit_on_user_error():
        named = write(folder)
        print(f"written: {folder}. For VS Code with the extension redhat.vscode-yaml, .vscode/settings.json:")
        print(json.dumps({"yaml.schemas": named}, indent=2))


def write(folder: Path) -> dict[str, list[str]]:
    """Write a file for each group and root; return the files of a project that each is for, by its path."""
    from simbal.config.json_schema import files_of, schemas
    from simbal.cost.hardware import Hardware  # torch: 3 s that --help does not pay

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    named = {}
    for name, schema in schemas({"hardware": Hardware}).items():
        file = folder / f"{name}.schema.json"
        write_json(file, schema)
        named[file.as_posix()] = files_of(name)
    return named
