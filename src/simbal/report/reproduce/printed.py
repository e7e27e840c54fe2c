"""Printed numbers: where they stand in a text, and whether they are a value rounded to the digits that they show."""

import re
from dataclasses import dataclass, field

NUMBER = re.compile(r"(?<![\w.])[<+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass
class Checked:
    """What has become of the numbers of a file."""

    verified: int = 0
    wrong: list[str] = field(default_factory=list)  # sentences
    unverified: list[str] = field(default_factory=list)  # numbers, as printed

    def add(self, other: "Checked") -> None:
        """Add what has become of the numbers of another file."""
        self.verified += other.verified
        self.wrong += other.wrong
        self.unverified += other.unverified

    def hold(self, printed: str, value: float, where: str) -> None:
        """Count a number as verified, or as wrong with a sentence that begins with `where`."""
        if agrees(printed, value):
            self.verified += 1
        else:
            self.wrong.append(f"{where}: {printed} is printed, and the rows give {value:.6g}")


def agrees(printed: str, value: float) -> bool:
    """Whether a printed number is `value`, rounded to as many digits; `<0.001` holds for what is below."""
    text = printed.replace(",", "")
    if text.startswith("<"):
        return value < float(text[1:])
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(text) - value) <= unit / 2 * (1 + 1e-6)


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, in its order."""
    return NUMBER.findall(text)
