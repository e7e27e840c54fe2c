"""Importing what trains is quick, and leaves the garbage collector as it was, with nothing imported to look at."""

import subprocess
import sys

import pytest

ASK = "import gc; {before}; import simbal.training; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"


def in_a_new_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow  # starts Python anew
@pytest.mark.parametrize(("before", "enabled"), [("pass", True), ("gc.disable()", False)])
def test_what_is_imported_is_not_looked_at_for_garbage(before, enabled):
    assert in_a_new_python(ASK.format(before=before)).split() == [str(enabled), "True"]


@pytest.mark.slow
def test_of_torchmetrics_what_nobody_asks_for_is_not_imported():
    said = in_a_new_python(
        "import sys, simbal.training, torchmetrics; print('torchmetrics.functional' in sys.modules);"
        "print(torchmetrics.Accuracy(task='binary'), 'torchmetrics.functional' in sys.modules)"
    )
    assert said == "False\nBinaryAccuracy() True\n"


@pytest.mark.slow
def test_a_metric_that_was_imported_before_is_one_to_lightning():
    said = in_a_new_python(
        "import torchmetrics, simbal.training, lightning.pytorch.core.module as core;"
        "print(core.Metric is torchmetrics.Metric, isinstance(torchmetrics.MeanMetric(), core.Metric))"
    )
    assert said == "True True\n"
