"""Run folders as somebody with bad intentions would send them: each attack changes a finished run.

What it signs, it signs well: checksums and hashes fit, so that nothing but the attack itself can be refused.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from simbal.runs import record as record_schema
from simbal.runs.folder import RunFolder

EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\nclass SimBal: ...\n"
BOMB = "a: &a0 {k: 1}\n" + "".join(f"b{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))


def _write_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.yaml, and the record so that it speaks of the changed one."""
    file = folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    change(saved)
    file.write_text(yaml.safe_dump(saved, sort_keys=False))
    record = json.loads((folder / "record.json").read_text())
    RunFolder(folder).write_record(record | {"config_hash": RunFolder(folder).read_spec().hash})


def _name_a_class(folder: Path) -> Path:
    """Of a package that lies where the program is started, in the run's folder itself."""
    (folder / "__init__.py").write_text(EVIL)

    def change(saved: dict[str, Any]) -> None:
        for keys in saved["balancing"].values():
            keys["_target_"] = f"{folder.name}.SimBal"

    _write_config(folder, change)
    return folder / "executed"


def _name_a_place(folder: Path) -> Path:
    """Where data are to be fetched from and written to."""
    cache = folder / "written"

    def change(saved: dict[str, Any]) -> None:
        saved["data"] |= {"cache_dir": str(cache), "seed": 12345}

    _write_config(folder, change)
    record = json.loads((folder / "record.json").read_text())
    RunFolder(folder).write_record(record | {"data": record["data"] | {"tokens": "0" * 64}})
    return cache


def _bomb(folder: Path) -> Path:
    (folder / "config.yaml").write_text(BOMB)
    return folder / "executed"


def _never_ends(folder: Path) -> Path:
    """A pipe in the place of the record, and zeros without end in that of the curves."""
    for name in ("record.json", "metrics.jsonl"):
        (folder / name).unlink()
    os.mkfifo(folder / "record.json")
    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    return folder / "executed"


def _backtracks(folder: Path) -> Path:
    """A definition that a regular expression would try to fit for ever."""
    (folder / "analysis").mkdir(exist_ok=True)
    finding = {"settings": {}, "definition": {"<a>" * 40 + "!": "x"}, "metrics": {"a" * 60: 1.0}}
    (folder / "analysis" / "routing.json").write_text(json.dumps(record_schema.sealed(finding)))
    return folder / "executed"


# by name: spoils a copy of a finished run; returns the file that must not come into being
ATTACKS: dict[str, Callable[[Path], Path]] = {
    "class": _name_a_class,
    "place": _name_a_place,
    "bomb": _bomb,
    "pipe": _never_ends,
    "definition": _backtracks,
}
