"""Importing what trains leaves the garbage collector as it was, with nothing of what was imported to look at."""

import subprocess
import sys

import pytest

ASK = "import gc; {before}; import simbal.training; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"


@pytest.mark.slow  # starts Python anew
@pytest.mark.parametrize(("before", "enabled"), [("pass", True), ("gc.disable()", False)])
def test_what_is_imported_is_not_looked_at_for_garbage(before, enabled):
    asked = subprocess.run(
        [sys.executable, "-c", ASK.format(before=before)], capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == [str(enabled), "True"]
