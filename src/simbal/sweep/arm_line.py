"""An arm of a sweep: overrides that go together, in one line."""

import re

_BEFORE_OVERRIDE = re.compile(r"\s+(?=~|\+*[\w./@]+=)")


def split_arm(line: str) -> list[str]:
    """The overrides of an arm; the blanks in `tag(log, interval(1, 2))` part nothing."""
    return [part for part in _BEFORE_OVERRIDE.split(line.strip()) if part]
