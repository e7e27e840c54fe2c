"""Writes the comments beside the keys of conf/: their meanings in src/simbal/config/schema.py (`make format`).

Strategies, analyses and the other programs' roots have no schema, and comments of their own.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from simbal.config.options import CONF, read
from simbal.config.schema import Config, models_of

ALIGNED = 24  # signs of a key with its value; a longer one's comment stands further right than the others
_KEY_LINE = re.compile(r"((\w+):.*?)(?:\s+# (.*))?")  # at the left margin: nested keys are values


def write_comments(conf: Path = CONF) -> None:
    """Write the comments of all files of `conf` that have a schema; those that are right stay untouched."""
    for file, model in described(conf):
        text = file.read_text(encoding="utf-8")
        meanings = {name: str(field.description) for name, field in model.model_fields.items()}
        if (made := commented(text, meanings)) != text:
            file.write_text(made, encoding="utf-8")


def described(conf: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield every file of `conf` that has a schema, and the model of its keys."""
    yield conf / "config.yaml", Config
    for group, field in Config.model_fields.items():
        models = models_of(field.annotation)
        for file in sorted((conf / group).glob("*.yaml")) if models else ():
            keys = read(file).keys() - {"defaults"}
            yield file, next(model for model in models if keys <= model.model_fields.keys())


def commented(text: str, meanings: dict[str, str]) -> str:
    """Return YAML with the meaning of each key behind it, aligned; what has no meaning keeps its comment."""
    lines = text.splitlines()
    found = {place: match for place, line in enumerate(lines) if (match := _KEY_LINE.fullmatch(line))}
    said = {place: meanings.get(match[2], match[3]) for place, match in found.items()}
    lengths = [len(match[1]) for place, match in found.items() if said[place] and len(match[1]) <= ALIGNED]
    for place, match in found.items():
        lines[place] = f"{match[1]:<{max(lengths, default=0)}}  # {said[place]}" if said[place] else match[1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_comments()
