"""A small language that chooses runs by their config, their numbers and how they ended.

    balancing=lbl and val/ppl<30
    not (status=finished or seed>=5)

A comparison has a name, one of `=`, `!=`, `<`, `<=`, `>`, `>=`, and a value: a number, true, false, null or text, in
quotes where it has blanks. What a run has no value for satisfies no comparison. Nothing is evaluated as Python.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from simbal.errors import UserError
from simbal.metrics.table import NUMBERS, short_name
from simbal.runs.record import is_number

TOKEN = re.compile(r"\s*(?:(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<sign>[<>!=]=|[=<>()])|(?P<word>[^\s=<>!()'\"]+))")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
CONSTANTS = {"true": True, "false": False, "null": None}
DEEPEST = 50  # brackets within brackets
SHOWN = 200  # letters of a query that a message repeats
OWN = frozenset(metric.key for metric in NUMBERS)
Values = Mapping[str, Any]  # of a run, by name
Condition = Callable[[Values], bool]


@dataclass(frozen=True)
class Token:
    """A word, a text in quotes or a sign of a query."""

    text: str
    kind: str


def is_query(text: str) -> bool:
    """Whether a text has a comparison, so that it is no name of a folder."""
    return re.search("[<>=]", text) is not None


def parse(text: str, known: Collection[str]) -> Condition:
    """Return whether a run is meant, as a function of its values.

    Args:
        text: the query.
        known: the names that may be compared; each may also be given by its last part if no other ends like it.

    Raises:
        UserError: the text is no query, or it compares what there is not.
    """
    parser = _Parser(text, known)
    condition = parser.either()
    if parser.tokens:
        raise parser.refusal(f"{parser.tokens[0].text!r} is one word too many")
    return condition


def full_name(name: str, known: Collection[str]) -> str:
    """Return the known name that a user means; numbers of the run itself come before those of its analyses.

    Raises:
        UserError: there is none, or several end like it.
    """
    if name in known:
        return name
    short = {key for key in known if name == short_name(key)}
    found = sorted(short & OWN or short)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{name} may be {' or '.join(found)}: give the whole name")
    ordered = sorted(known, key=lambda key: (key in OWN, key))  # of equal last parts the run's own number counts
    candidates = {short_name(key): key for key in ordered} | {key: key for key in ordered}
    near = [candidates[one] for one in get_close_matches(name, candidates, 1, 0.5)]
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"runs have no {name[:SHOWN]}{hint}")


class _Parser:
    """A parser by recursive descent: `or` binds less than `and`, and `and` less than `not`."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self.text, self.known, self.depth = text, known, 0
        self.tokens = [*self._tokens(text)]

    def refusal(self, why: str) -> UserError:
        return UserError(f"{self.text[:SHOWN]!r} is no query ({why}): write such as 'balancing=lbl and val/ppl<30'")

    def either(self) -> Condition:
        conditions = [self._all()]
        while self._takes("or"):
            conditions.append(self._all())
        return lambda run: any(condition(run) for condition in conditions)

    def _all(self) -> Condition:
        conditions = [self._one()]
        while self._takes("and"):
            conditions.append(self._one())
        return lambda run: all(condition(run) for condition in conditions)

    def _one(self) -> Condition:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.refusal(f"more than {DEEPEST} brackets or negations within another")
        try:
            if self._takes("not"):
                negated = self._one()
                return lambda run: not negated(run)
            if self._takes("("):
                inner = self.either()
                if not self._takes(")"):
                    raise self.refusal("a bracket is not closed")
                return inner
            return self._comparison()
        finally:
            self.depth -= 1

    def _comparison(self) -> Condition:
        if not self.tokens or self.tokens[0].kind == "sign":
            raise self.refusal("a name is missing")
        said, sign = self.tokens.pop(0), self.tokens.pop(0) if self.tokens else None
        if sign is None or sign.text not in SIGNS or sign.kind != "sign":
            raise self.refusal(f"{said.text} is compared with nothing")
        if not self.tokens or self.tokens[0].kind == "sign":
            raise self.refusal(f"there is no value after {said.text}{sign.text}")
        value = self.tokens.pop(0)
        return _compares(full_name(said.text, self.known), sign.text, value)

    def _takes(self, text: str) -> bool:
        """Take the next token if it is this keyword or bracket."""
        if self.tokens and self.tokens[0].text == text and self.tokens[0].kind != "quoted":
            del self.tokens[0]
            return True
        return False

    def _tokens(self, text: str) -> Iterable[Token]:
        place, end = 0, len(text.rstrip())
        while place < end:
            match = TOKEN.match(text, place)
            if match is None:
                raise self.refusal(f"{text[place:].strip()[:20]!r} cannot be read")
            kind = str(match.lastgroup)
            yield Token(match[kind][1:-1] if kind == "quoted" else match[kind], kind)
            place = match.end()


def _compares(name: str, sign: str, said: Token) -> Condition:
    """Return the comparison of a run's value with the one that was said."""
    value: Any = said.text if said.kind == "quoted" else _constant(said.text)
    compare, ordered = SIGNS[sign], sign not in ("=", "==", "!=")

    def holds(run: Values) -> bool:
        own = run.get(name, ...)
        if own is ... or (own is None and (ordered or value is not None)):
            return False
        if is_number(own) and is_number(value):
            return compare(own, value)
        if not ordered:
            return compare(own, value) if value is None or isinstance(value, bool) else compare(_text(own), said.text)
        if is_number(own) or not isinstance(own, str):
            raise UserError(f"{name}{sign}{said.text}: {name} is {_text(own)} in a run, which has no order with that")
        return compare(own, said.text)

    return holds


def _constant(text: str) -> Any:
    if text in CONSTANTS:
        return CONSTANTS[text]
    number = float(text) if NUMBER.fullmatch(text) else None
    return number if is_number(number) else text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
