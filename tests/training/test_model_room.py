"""A model that is larger than the computer's memory is refused before any of it, or of its data, is made."""

import pytest

from simbal.analysis.shared.trained import load
from simbal.cost.parameters import bytes_to_make
from simbal.errors import UserError
from simbal.hub.finished_run import read_run
from simbal.training import build, free_memory, run
from simbal.training.build import transformer_shape
from simbal.training.free_memory import require_room, whole_memory
from simbal.training.run import train
from tests.forged_runs import forge
from tests.training.test_free_memory import MEGABYTE, computer, group  # noqa: F401  a fixture

HUGE = (
    "model.num_layers=100000000", "model.num_experts=1000000000", "model.d_model=1000000000",
    "model.d_expert=1000000000", "data.vocab_size=2147483648",
)  # fmt: skip
SAYS = (
    r"^this computer has no room for the model: its [\d,]+ weights in [\d,]+ layers need [\d.,]+ GB, and there are "
    r"[\d.,]+ GB: use a smaller model$"
)


@pytest.fixture
def nothing_is_made(monkeypatch):
    def made(*_, **__):
        raise AssertionError("something was made")

    for place, name in ((build, "Transformer"), (build, "build_balancing"), (run, "prepare")):
        monkeypatch.setattr(place, name, made)
    monkeypatch.setattr("simbal.hub.finished_run.Transformer", made)
    monkeypatch.setattr("simbal.analysis.shared.trained.run_store", made)


@pytest.mark.parametrize("key", HUGE)
def test_it_is_refused_in_training(small_spec, nothing_is_made, key, tmp_path):
    with pytest.raises(UserError, match=SAYS):
        train(small_spec("router.init=normal", key))
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("key", HUGE)
def test_it_is_refused_when_somebody_elses_run_is_read(write_run, nothing_is_made, key):
    name, _, value = key.partition("=")
    path = write_run()
    forge(path, "balancing.simbal._target_", "simbal.balancing.simbal.SimBal")
    forge(path, name, int(value))
    for read in (load, read_run):
        with pytest.raises(UserError, match=SAYS):
            read(path)


def test_what_there_is_is_the_computers_memory_or_its_groups_limit_with_swap(computer):  # noqa: F811
    computer(total=512 * MEGABYTE, available=MEGABYTE, swap=64 * MEGABYTE)
    assert whole_memory() == 576 * MEGABYTE
    groups = group("a/", 300 * MEGABYTE, 299 * MEGABYTE, 0)
    computer(total=512 * MEGABYTE, available=MEGABYTE, own="0::/a\n", groups=groups)
    assert whole_memory() == 300 * MEGABYTE
    computer(total=512 * MEGABYTE, available=MEGABYTE, own="0::/a\n", groups=group("a/", "max", 1, 0))
    assert whole_memory() == 512 * MEGABYTE


def test_a_model_that_just_fits_is_not_refused(small_spec, computer, monkeypatch):  # noqa: F811
    shape = transformer_shape(small_spec(), 0)
    monkeypatch.setattr(free_memory, "whole_memory", lambda: bytes_to_make(shape))
    require_room(shape)
    monkeypatch.setattr(free_memory, "whole_memory", lambda: bytes_to_make(shape) - 1)
    with pytest.raises(UserError, match=SAYS):
        require_room(shape)
    monkeypatch.setattr(free_memory, "whole_memory", lambda: None)  # as on systems other than Linux
    require_room(shape)
