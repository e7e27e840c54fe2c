"""Text from files as it may be shown: no character in it commands a terminal or turns the writing round."""

import re

# but for tabs and line breaks, all controls of C0 and C1, and those of the direction of writing
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with a space in place of each control character (`COMMANDS`)."""
    return COMMANDS.sub(" ", text)
