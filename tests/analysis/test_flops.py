"""The analysis `flops`: parameters and FLOPs of the paper's four models."""

import pytest

from simbal.analysis.flops import PAPER, flops, preset_shape
from simbal.config.schema import CL100K_IDS
from simbal.cost import parameters

KEYS = {
    "preset": "moe_l", "vocab_size": CL100K_IDS, "seq_len": 2048, "steps": None, "batch_tokens": 2**20,
}  # fmt: skip
GOLDEN = {
    "embedding": (77_012_736, 77_012_736, 154_025_472, 154_025_472),
    "head": (77_012_736, 77_012_736, 154_025_472, 154_025_472),
    "attention": (18_874_368, 18_874_368, 113_246_208, 113_246_208),
    "ffn": (56_623_104, 452_984_832, 339_738_624, 2_717_908_992),
    "ffn_active": (56_623_104, 56_623_104, 339_738_624, 339_738_624),
    "router": (0, 196_608, 0, 589_824),
    "norms": (13_056, 13_056, 38_400, 38_400),
    "total": (229_536_000, 626_094_336, 761_074_176, 3_139_834_368),
    "active": (229_536_000, 229_732_608, 761_074_176, 761_664_000),
    "without_embedding": (152_523_264, 152_719_872, 607_048_704, 607_638_528),
    "matrices": (152_510_208, 152_706_816, 607_010_304, 607_600_128),
    "forward_flops": (330_198_528, 330_591_744, 1_289_554_944, 1_290_734_592),
}
COSTS = {
    "training_flops": ("1.9736e+19", "1.9759e+19", "3.0424e+20", "3.0452e+20"),
    "6NT": ("1.8232e+19", "1.8256e+19", "2.8644e+20", "2.8672e+20"),
}


def counted(preset):
    return parameters(preset_shape(preset, CL100K_IDS))


def numbers(preset, **changes):
    return flops(**KEYS | {"preset": preset} | changes).record["metrics"]


@pytest.mark.parametrize(("index", "preset"), list(enumerate([*PAPER][:4])))
def test_parameters_and_flops_of_the_papers_models_are_exact(index, preset):
    found = numbers(preset)
    assert {name: found[name] for name in GOLDEN} == {name: values[index] for name, values in GOLDEN.items()}
    assert {name: f"{found[name]:.4e}" for name in COSTS} == {name: values[index] for name, values in COSTS.items()}


def test_biases_give_the_medium_model_the_papers_627m_parameters():
    found = {preset: numbers(preset)["total"] for preset in ("moe_m", "moe_m_bias")}
    assert {preset: round(total / 1e6) for preset, total in found.items()} == {"moe_m": 626, "moe_m_bias": 627}


def test_the_router_share_and_the_cost_of_all_experts_agree_with_the_paper():
    large = counted("moe_l")
    assert large.router / large.total == pytest.approx(0.00018785, abs=5e-9)
    assert large.every_expert == pytest.approx(4.91379, abs=5e-6)
    assert counted("moe_m").every_expert == pytest.approx(3.59535, abs=5e-6)
    assert counted("dense_m").every_expert == 1


def test_the_papers_numbers_are_shown_only_for_its_models_and_vocabulary():
    for changes, shown in (({}, True), ({"vocab_size": 50_304}, False), ({"preset": "tiny", "steps": 60}, False)):
        result = flops(**KEYS | changes)
        assert ("paper" in result.record) == ("paper" in [c.header for c in result.tables[0].columns]) == shown
