"""Errors that a user can put right, a program's exit codes, and the removal of secrets from the URLs in a text."""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from simbal.commands import as_typed

BUSY = os.EX_TEMPFAIL  # exit code where another process already holds what was asked for
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as in a shell
HIDDEN = "***"
# all before the last `@` of the part before the first slash; else, if a colon stands there, a password with signs that
# a URL should not have, up to the last `@` of the line. `:8080/` begins no password, and `[` an address.
USER = re.compile(r"(?<=://)(?!(?:\$\{[^{}]*\}|:)+@)(?:[^/\s?#\"']*@|[^/@:\s\[]*:(?!\d{1,5}(?:[/?#\s]|$))[^\n]*@)")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\n]*")
CREDENTIAL = r"[^=&;#\s\"'?]*(?:pass|pwd|secret|token|key|auth|sig|cred|session|jwt|code)[^=&;#\s\"'?]*"
STARS = r"\*\*\*[0-9a-f]{0,8}"
GIVEN = r"\$\{[^{}]*\}(?:[&\s]|$)"  # an interpolation of a config, such as ${oc.env:TOKEN}, is no secret
QUERY = re.compile(
    rf"(?<=[?&;])(?:(?P<credential>(?i:{CREDENTIAL}))=(?!{GIVEN})(?:{STARS}|[^&\s\"']+)"
    rf"|(?P<key>[^=&;#\s\"'?]+)=(?!{STARS}|{GIVEN})(?P<value>[^&;#\s\"']+))"
)


class UserError(ValueError):
    """An error that the user can put right: one sentence says what is wrong and what is allowed.

    The sentence holds no secret of a URL, whoever prints or writes it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(as_typed(redacted(sentence)))


class BusyError(UserError):
    """Another process already holds what was asked for, so that nothing has failed."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into `error: <sentence>` on stderr and exit code 1, or `BUSY`; others keep their traceback."""
    try:
        yield
    except BusyError as busy:
        print(f"error: {busy}", file=sys.stderr)
        raise SystemExit(BUSY) from None
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def exit_codes() -> Iterator[None]:
    """Make an interrupted program exit with 130 and a terminated one with 143.

    Lightning turns SIGTERM into a `SystemExit` without a code, which would be 0, success; and Ctrl-C into 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED) from None
        if end.code is None:
            raise SystemExit(TERMINATED) from None
        raise


def redacted(text: str) -> str:
    """Return `text` with `***` in place of the user and password of every URL in it and of every value of its query.

    Behind the stars of a value whose name is not that of a credential stands the beginning of its sha256, so that two
    URLs that ask for different data stay different. A text that is redacted already stays as it is.
    """
    return URL.sub(_without, text) if "://" in text else text


def _without(url: re.Match[str]) -> str:
    return QUERY.sub(_hidden, USER.sub(f"{HIDDEN}@", url[0]))


def _hidden(pair: re.Match[str]) -> str:
    if pair["credential"]:
        return f"{pair['credential']}={HIDDEN}"
    return f"{pair['key']}={HIDDEN}{hashlib.sha256(pair['value'].encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
