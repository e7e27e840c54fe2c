"""The paper's layer-wise values are whole steps of a bf16 rounding and a rest of 1e-10."""

import pytest
import torch

from simbal.analysis.gram_quanta import PAPER, QUANTUM, decode, gram_quanta
from simbal.metrics.similarity import mean_squared_deviation

MOE_M, MOE_L = PAPER.values()


@pytest.mark.parametrize(
    ("sixteenths", "diagonal", "quanta"),
    [((15, 5, 2, 1), 0.99609375, 1), ((16, 1, 1, 0), 1.0078125, 4), ((16, 0, 0, 0), 1.0, 0)],
)
def test_a_diagonal_entry_one_step_below_1_adds_a_quantum_and_one_step_above_adds_four(sixteenths, diagonal, quanta):
    rows_ED = torch.eye(32, 35)  # exact in bf16, as is every product below
    rows_ED[0] = 0
    rows_ED[0, [0, 32, 33, 34]] = torch.tensor(sixteenths) / 16
    assert (rows_ED[0] @ rows_ED[0]).item() == diagonal
    assert mean_squared_deviation(rows_ED).item() == quanta * QUANTUM == quanta * 2**-26


@pytest.mark.parametrize(
    ("model", "quanta", "least", "most"),
    [
        (MOE_M, [0, 0, 0, 0, 1, 2, 0, 0], 1.70e-10, 1.95e-10),
        (MOE_L, [1, 0, 0, 3, 1, 0, 0, 2, 3, 2, 4, 1], 8.9e-11, 1.17e-10),
    ],
)
def test_every_printed_value_is_whole_quanta_and_a_rest_that_hardly_varies(model, quanta, least, most):
    decoded = [decode(value) for value in model.simbal]
    assert [k for k, _ in decoded] == quanta
    assert all(least <= residual <= most for _, residual in decoded)


def test_the_main_text_prints_the_means_of_the_larger_models_columns():
    record = gram_quanta().record["models"]["MoE-L (table 10)"]
    assert record["mean_simbal"] == pytest.approx(2.12097e-8, rel=1e-5)
    assert record["mean_lbl"] == pytest.approx(0.0311436, rel=1e-5)
    simbal, lbl = MOE_L.main_text
    assert (f"{record['mean_simbal']:.3e}".replace("e-0", "e-"), f"{record['mean_lbl']:.4f}") == (simbal, lbl)


def test_the_decode_says_what_its_numbers_mean():
    (counted, meaning) = gram_quanta().notes
    assert "2^-8)^2 / 32^2 = 1.49012e-08" in counted
    assert "99.1% of what the tables print for SimBal is the rounding of a few diagonal entries" in meaning
