"""The words of a command line before they are read as overrides: flags, and blanks where none belong."""

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from simbal.cli.nearest import meant, nearest
from simbal.config.catalogue import SWEEPS, Catalogue
from simbal.errors import UserError

EXAMPLE = "such as seed=1"


def read_words(arguments: Sequence[str], catalogue: Catalogue) -> Namespace:
    """Return Hydra's flags and the overrides among `arguments`, in any order.

    Raises:
        UserError: for an unknown flag, and for words that are no `key=value`.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print its usage
    known, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise UserError(_unknown_flag(unknown[0], arguments, catalogue))
    for place, word in enumerate(known.overrides):
        _check_word(word, known.overrides[:place], known.overrides[place + 1 :], catalogue)
    return known


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}: --help lists what there is")


def _unknown_flag(flag: str, arguments: Sequence[str], catalogue: Catalogue) -> str:
    """Return what to write in place of `--seed 1` or `--seed=1`."""
    name, equals, value = flag.partition("=")
    following = arguments[[*arguments].index(flag) + 1 :][:1] if flag in arguments else []
    blank = not equals and following and "=" not in following[0] and not following[0].startswith("-")
    shown = f"{flag} {following[0]}" if blank else flag
    key = name.lstrip("-").replace("-", "_")
    keys = [*catalogue.keys(_chosen(catalogue)), *catalogue.options]
    right = key if key in keys else meant(key, keys)
    if right is None:
        return f"there is no flag {name}: keys are written without dashes, {EXAMPLE}; --help lists flags and keys"
    return f"{shown}: keys are written without dashes: {right}={value or (following[0] if blank else '...')}"


def _chosen(catalogue: Catalogue) -> dict[str, list[str]]:
    """Return the default choices that there are."""
    choices = catalogue.default_choices()
    return {group: [name for name in names if name in catalogue.options[group]] for group, names in choices.items()}


def _check_word(word: str, before: Sequence[str], after: Sequence[str], catalogue: Catalogue) -> None:
    """Refuse what a blank too many has made of `seed=1`, `columns=[ppl,seu]` or `name="a b"`."""
    last, following = ([*before][-1:] or [""])[0], ([*after][:1] or [""])[0]
    if word.endswith("=") and len(word) > 1 and following and "=" not in following:
        raise UserError(f"{word} {following}: write {word}{following}, without a blank")
    if word.startswith("=") and last and "=" not in last:
        value = word[1:] or following
        raise UserError(f"{last} {word}{'' if word[1:] else f' {value}'}: write {last}={value}, without blanks")
    if word.count("[") > word.count("]") and "=" in word:
        closing = next((place for place, other in enumerate(after) if "]" in other), None)
        if closing is not None:
            parts = [word, *after[: closing + 1]]
            raise UserError(f"{' '.join(parts)}: write {''.join(parts)}, without blanks, or put it into quotes")
    if "=" not in word and not word.startswith("~") and not following.startswith("="):
        raise UserError(_no_value(word, last, catalogue))


def _no_value(word: str, last: str, catalogue: Catalogue) -> str:
    """Return what a word without `=` may have meant: the option of a group, or the rest of a value."""
    groups = [group for group, options in catalogue.options.items() if word in options]
    if groups:
        return f"{word} is no key=value; did you mean {' or '.join(f'{group}={word}' for group in groups)}?"
    keys = [*catalogue.keys(_chosen(catalogue)), *catalogue.options]
    if word in keys:
        options = f" (there is {', '.join(catalogue.options[word])})" if word in catalogue.options else ""
        return f"{word} has no value: write {word}=...{options}"
    if "=" in last:
        return f"{word} is no key=value; a value with a blank goes into quotes: '{last} {word}'"
    if "/" in word and ("run" in keys or SWEEPS in catalogue.options):
        return f"{word} is no key=value; did you mean run={word}?"
    return f"{word} is no key=value, {EXAMPLE}{nearest(word, keys)}"
