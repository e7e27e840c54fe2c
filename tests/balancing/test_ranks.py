"""Two data-parallel ranks with half of the batch each do what one does with all of it, where a strategy says so."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.balancing.cases import CASES
from tests.balancing.tiny_training import outcome, same, tiny_module, train
from tests.balancing.two_ranks import STEPS

ROOT = Path(__file__).parents[2]


def test_the_number_of_ranks_matters_only_if_declared(tmp_path):
    file = tmp_path / "outcomes.pt"
    subprocess.run([sys.executable, "-m", "tests.balancing.two_ranks", file], cwd=ROOT, check=True)
    on_two = torch.load(file, weights_only=True)
    wrong = []
    for case in CASES:
        module = tiny_module(case)
        train(module, STEPS)
        if same(outcome(module), on_two[str(case)]) == (case.make().properties.scope == "micro"):
            wrong.append(str(case))
    assert len(on_two) == len(CASES)
    assert not wrong
