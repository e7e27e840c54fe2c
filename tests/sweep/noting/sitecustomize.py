"""For PYTHONPATH: every process notes which YAML files it opens, and which overrides it takes apart for whom."""

import json
import os
import sys


def note(file, *said):
    line = json.dumps([os.getpid(), *said]) + "\n"
    opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(opened, line.encode())
    os.close(opened)


def hear(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".yaml"):
        note("opened", arguments[0])


def note_parsing():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse = OverridesParser.parse_overrides

    def parse_overrides(self, overrides):
        for line in overrides:
            note("parsed", sys._getframe(1).f_globals["__name__"], line)
        return parse(self, overrides)

    OverridesParser.parse_overrides = parse_overrides


sys.addaudithook(hear)
note_parsing()
