import base64
import io

import numpy as np
import pytest
from PIL import Image

from simbal.errors import UserError
from simbal.report.page import heat, series
from simbal.report.page.heat import heat_maps
from tests.report.page.conftest import STEPS, row, write_rows


@pytest.fixture
def arms(sweep, table_of):
    return lambda: series.read([row.arm for row in table_of(sweep).rows], "lbl")


def pixels(address):
    kind, _, text = address.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_a_row_is_an_expert_and_a_column_a_validation(write_run, arms):
    write_run()
    (found,), largest = heat_maps(arms())
    assert (found.name, found.num_experts, found.tokens, found.left_out) == ("simbal seed=0", 4, (0, 400), "")
    assert [layer for layer, _ in found.layers] == [0, 1]
    first, second = (pixels(address) for _, address in found.layers)
    assert first.shape == second.shape == (4, len(STEPS))
    assert (second == [[31] * 5, [31] * 5, [0] * 5, [0] * 5]).all()  # twice the even load, and none
    assert (first[:, 0] == 16).all()  # the even load
    assert (np.diff(first[0].astype(int)) > 0).any()
    assert largest == 2.0


def test_the_image_of_a_shade_has_its_colour(write_run, arms):
    scale = Image.open(io.BytesIO(base64.b64decode(heat.scale().partition(",")[2]))).convert("RGB")
    never, even, most = (scale.getpixel((x, 0)) for x in (0, 16, 31))
    assert never[2] > never[1]  # violet
    assert min(even) > 230
    assert most[0] > most[2]  # orange


def test_very_many_cells_are_thinned_and_it_is_said(write_run, arms, monkeypatch):
    write_run()
    monkeypatch.setattr(heat, "MOST_CELLS", 24)
    (found,), _ = heat_maps(arms())
    assert [pixels(image).shape for _, image in found.layers] == [(4, 3)] * 2
    assert found.left_out == "3 of 5 validations"
    assert found.tokens == (0, 400)


def test_without_loads_there_is_no_map(write_run, arms):
    write_run(dense=True)
    assert heat_maps(arms()) == ([], 2.0)


@pytest.mark.parametrize("counts", [7, [[]], [["x"]], [[-1, 2]], [None]])
def test_broken_counts_are_an_error(write_run, arms, counts):
    path = write_run()
    broken = row(0, 0, False)
    write_rows(path, [broken | {"layers": broken["layers"] | {"val/tokens_per_expert": counts}}])
    with pytest.raises(UserError, match="is no number"):
        heat_maps(arms())
