"""Write the comments of keys in conf/ from the descriptions in src/simbal/config/schema.py (`make format`).

Files without a schema keep their comments: strategies, analyses, and the root configs of programs other than train.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from simbal.config.options import CONF, GLOBAL_PACKAGE, read
from simbal.config.schema import Config, models_of

ALIGNED = 24  # maximum length of `key: value` with an aligned comment
_KEY_LINE = re.compile(r"((\w+):.*?)(?:\s+# (.*))?")  # not indented: nested keys are part of a value


def write_comments(conf: Path = CONF) -> None:
    """Write the comments of all files in `conf` that have a schema."""
    for file, model in described(conf):
        text = file.read_text(encoding="utf-8")
        meanings = {name: str(field.description) for name, field in model.model_fields.items()}
        if (new_text := commented(text, meanings)) != text:
            file.write_text(new_text, encoding="utf-8")


def described(conf: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield every file in `conf` that has a schema, with the model of its keys."""
    yield conf / "config.yaml", Config
    for group, field in Config.model_fields.items():
        models = models_of(field.annotation)
        for file in sorted((conf / group).glob("*.yaml")) if models else ():
            if file.read_text(encoding="utf-8").startswith(GLOBAL_PACKAGE):  # sets keys of several groups
                continue
            keys = read(file).keys() - {"defaults"}
            yield file, next(model for model in models if keys <= model.model_fields.keys())


def commented(text: str, meanings: dict[str, str]) -> str:
    """Return YAML with the meaning of each key as an aligned comment. Keys without a meaning keep their comments."""
    lines = text.splitlines()
    matches = {place: match for place, line in enumerate(lines) if (match := _KEY_LINE.fullmatch(line))}
    comments = {place: meanings.get(match[2], match[3]) for place, match in matches.items()}
    lengths = [len(match[1]) for place, match in matches.items() if comments[place] and len(match[1]) <= ALIGNED]
    for place, match in matches.items():
        lines[place] = f"{match[1]:<{max(lengths, default=0)}}  # {comments[place]}" if comments[place] else match[1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_comments()
