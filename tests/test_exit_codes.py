"""A program that was stopped says so by its exit code, whatever Lightning and Hydra make of the signal."""

import sys

import pytest

from simbal.cli import command_line


def raised(error: BaseException) -> object:
    with pytest.raises(SystemExit) as end, command_line.exit_codes():
        raise error
    return end.value.code


def test_a_terminated_program_exits_143_and_an_interrupted_one_130():
    assert raised(SystemExit()) == 143  # as Lightning's SIGTERMException
    assert raised(KeyboardInterrupt()) == 130
    assert raised(SystemExit(1)) == 1
    assert raised(SystemExit("error: x")) == "error: x"


def test_lightnings_exit_after_an_interrupt_is_an_interrupt():
    def lightning():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    with pytest.raises(SystemExit) as end, command_line.exit_codes():
        lightning()
    assert end.value.code == 130
