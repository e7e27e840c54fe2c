"""The texts of results/: README.md.jinja is what people write, README.md the same with its numbers, from rows.csv.

A template has each study by its name, `{{ significance.mean("ppl", "lbl") | as(".2f") }}`, and `total("tokens")`, which
is over every origin.json. So a number of a text cannot part from its rows, and a text older than its template is found.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from simbal.errors import UserError
from simbal.files.disk import write_text
from simbal.report.reproduce.evidence import spent
from simbal.report.reproduce.formulas import Computed, Study, shown
from simbal.report.reproduce.printed import NUMBER, Checked, numbers
from simbal.report.reproduce.rows import ROWS

TEXT, TEMPLATE = "README.md", "README.md.jinja"
MARK = "\0"  # stands around what is computed, until it is counted
NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code and targets of links
WRONG = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError)  # what a template may raise


def write_texts(results: Path) -> list[Path]:
    """Write the text beside each template of `results` and of the folders in it; return those texts.

    Raises:
        UserError: a template names what is not there, or is none.
    """
    written = []
    for template in sorted(results.glob(f"**/{TEMPLATE}")):
        written.append(template.with_name(TEXT))
        write_text(written[-1], _rendered(template, results).replace(MARK, ""))
    return written


def check_text(file: Path, results: Path) -> Checked:
    """Hold a text against its template; where it has none, all its numbers are unverified.

    Raises:
        UserError: the text is not there, or as `write_texts`.
    """
    checked, template = Checked(), file.with_name(TEMPLATE)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(f"{file} cannot be read: make figures writes it") from None
    rendered = _rendered(template, results) if template.exists() else text
    *parts, last = rendered.split(MARK)  # prose and what is computed in turn
    checked.verified = sum(len(numbers(part)) for part in parts[1::2])
    prose = "".join([*parts[::2], last])
    checked.unverified = NUMBER.findall(NO_PROSE.sub(" ", prose))
    for place, (ours, theirs) in enumerate(
        zip(text.splitlines(), rendered.replace(MARK, "").splitlines(), strict=False)
    ):
        if ours != theirs:
            checked.wrong.append(f"line {place + 1} is not as {TEMPLATE} and the rows have it, which give: {theirs}")
    if not checked.wrong and text != rendered.replace(MARK, ""):
        checked.wrong.append(f"it ends otherwise than {TEMPLATE}")
    return checked


def _rendered(template: Path, results: Path) -> str:
    """Return the text of a template, with `MARK` before and after each thing that is computed."""
    studies = {file.parent.name: Study(file.parent) for file in results.glob(f"*/{ROWS}")}
    names: dict[str, Any] = {**studies, "total": lambda key: float(sum(spent(results, key).values()))}
    try:
        source = template.read_text(encoding="utf-8")
        return _environment().from_string(source).render(names)
    except WRONG as error:
        line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        raise UserError(f"{template}{line}: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment in which templates compute and call, and reach nothing else."""
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, finalize=_marked
    )
    filters: dict[str, Callable[..., Any]] = {"as": shown}
    environment.filters |= filters
    return environment


def _marked(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError(f"{value} needs a format: | as('.2f')")
    return f"{MARK}{value}{MARK}" if isinstance(value, Computed) else value
