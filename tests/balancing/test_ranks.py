"""Two data-parallel ranks with half of the batch each do what one does with all of it, where a strategy says so."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from simbal import distributed
from simbal.conformance import same
from tests.balancing.cases import CASES
from tests.balancing.two_ranks import OF_EACH_SCOPE, Threads, trained

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_matter_only_if_declared_and_then_as_micro_batches_do(case, monkeypatch):
    alone, cut, ranks = trained(case), trained(case, micro_batches=2), Threads()
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "dist", ranks)
        first, second = ranks.run(lambda rank: trained(case, rank=rank))
    assert same(first, second, exactly=True)
    assert same(first, alone) != (case.make().properties.scope == "micro")
    assert same(first, cut)


@pytest.mark.slow
def test_ranks_that_are_processes_do_what_two_micro_batches_do(tmp_path):
    file = tmp_path / "outcomes.pt"
    subprocess.run([sys.executable, "-m", "tests.balancing.two_ranks", file], cwd=ROOT, check=True)
    on_two = torch.load(file, weights_only=True)
    assert len(on_two) == 5
    assert all(same(trained(case, micro_batches=2), on_two[str(case)]) for case in OF_EACH_SCOPE)
