"""Signals of the programs that tests start."""

import signal


def hear_ctrl_c() -> None:
    """For `preexec_fn`: a shell that runs the tests in the background has them, and their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
