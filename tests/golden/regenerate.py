"""Writes the files of pins anew from the code as it is: python -m tests.golden.regenerate.

A new pin is an entry without an answer, which this fills in. Read the difference before you keep it: each line of it
is a command that means something else than before.
"""

from tests.golden import pins


def main() -> None:
    """Answer every question again."""
    entries = pins.read(pins.COMMANDS)["commands"]
    commands = [pins.question(entry) | pins.command(entry) for entry in entries]
    content = pins.text_of(pins.COMMANDS, {"default": pins.default(), "commands": commands})
    pins.COMMANDS.write_text(content, encoding="utf-8")
    refusals = {
        topic: [pins.question(entry) | pins.refusal(entry) for entry in entries]
        for topic, entries in pins.read(pins.REFUSALS).items()
    }
    pins.REFUSALS.write_text(pins.text_of(pins.REFUSALS, refusals), encoding="utf-8")


if __name__ == "__main__":
    main()
