"""Router saturation: a run's choices held against those of another run, or of its own earlier weights."""

from functools import cache

import pytest

from simbal.analysis.routing import routing
from simbal.analysis.trained import load
from simbal.errors import UserError
from simbal.training.run import train
from tests.analysis.module_runs import trained_run

KEYS = {"tokens": None, "batch_size": 4, "pairs": 64, "bins": 4, "seed": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir):
    """`trained("balancing=lbl")`: the run, trained once in this file; weights of every second step are kept."""

    @cache
    def run(*overrides):
        return trained_run(tmp_path_factory, cache_dir, "trainer.max_steps=4", "trainer.keep_every=2", *overrides)

    return run


def saturation(run, against):
    return routing(run, **KEYS, against=str(against)).record["metrics"]["saturation"]


def test_it_is_1_against_the_run_itself_and_its_last_weights_and_less_against_earlier_ones(trained):
    run = trained("balancing=simbal", "optim.lr=0.05")
    kept = sorted((run.path / "checkpoints").iterdir())
    assert [file.name for file in kept] == ["final.ckpt", "weights-00000002.ckpt", "weights-00000004.ckpt"]
    final, second, fourth = (saturation(run, against) for against in kept)
    assert final == fourth == saturation(run, run.path) == 1.0
    assert 0 < second < 1


def test_both_choose_for_the_same_windows_where_another_data_seed_would_draw_others(trained):
    one, other = (trained("balancing=simbal", "optim.lr=1e-12", f"data.seed={seed}") for seed in (0, 1))
    assert one.validation.sample(64).tolist() != other.validation.sample(64).tolist()
    finding = routing(one, **KEYS | {"tokens": 64}, against=str(other.path))
    assert finding.record["metrics"]["saturation"] == 1.0


@pytest.mark.parametrize(
    ("change", "difference"), [("model.num_experts=8", "model.num_experts=8"), ("data.documents=65", "tokens=")]
)
def test_a_run_that_cannot_be_compared_is_refused(trained, change, difference):
    run, unlike = trained("balancing=simbal"), trained("balancing=lbl", change)
    with pytest.raises(UserError, match=f"^analysis.routing.against={unlike.path} has {difference}.*{run.path} has"):
        saturation(run, unlike.path)


def test_keeping_weights_changes_no_bit_of_the_run(trained, small_spec):
    spec = small_spec("trainer.max_steps=4", "balancing=lf_simbal")
    train(spec)
    kept = trained("balancing=lf_simbal").module.state_dict()
    state = load(spec.path).module.state_dict()
    assert state.keys() == kept.keys()
    assert all((tensor == kept[name]).all() for name, tensor in state.items())
    assert [file.name for file in (spec.path / "checkpoints").iterdir()] == ["final.ckpt"]
