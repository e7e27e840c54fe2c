"""The table groups runs into arms and compares them with the baseline, and its notes state its limits."""

import math
from dataclasses import replace
from math import log
from statistics import fmean, stdev

import numpy as np
import pytest

from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS
from simbal.report import sections
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import collect
from simbal.report.columns import ABSENT, Cell, choose_columns
from simbal.report.comparison import conclusion_word
from simbal.report.notes import explanations, is_control, notes
from simbal.report.report import report
from simbal.report.table import build

UNIFORM = {"balancing.uniform._target_": "simbal.balancing.controls.UniformRouting"}
NONE = {"balancing.none._target_": "simbal.balancing.controls.NoBalancing"}


def table_of(folder, baseline=None, **options):
    return build(folder.name, collect(folder), baseline, **options)


def notes_of(folder, *words):
    return [note for note in notes(table_of(folder)) if all(word in note for word in words)]


@pytest.fixture
def write_arm(write_run):
    """Writes a run for each perplexity, with seeds from 0, and returns the folder."""

    def write(name, *perplexities, keys=None, **metrics):
        for seed, ppl in enumerate(perplexities):
            run = write_run(name, seed, keys=keys or {}, metrics={"val/ppl": ppl} | metrics)
        return run.parent

    return write


@pytest.fixture
def two_arms(write_arm):
    """lbl, and simbal 4, 3 and 2 below it on three seeds."""
    write_arm("lbl", 101.0, 103.0, 105.0)
    return write_arm("simbal", 97.0, 100.0, 103.0)


@pytest.fixture
def coefficients(write_arm):
    """lbl, and simbal with three coefficients, each better than the one before."""
    write_arm("lbl", 20.0, 21.0, 22.0)
    for coef, gain in ((0.1, 1.0), (0.2, 2.0), (0.3, 3.0)):
        values = [20.0 + seed - gain - seed * coef for seed in range(3)]
        folder = write_arm("simbal", *values, keys={"balancing.simbal.coef": coef})
    return folder


@pytest.mark.parametrize("reverse", [False, True])
def test_the_name_of_an_arm_does_not_depend_on_the_order_of_runs(small_spec, reverse):
    arms = [("balancing=frozen", "optim.lr=1e-3"), ("balancing=simbal", "balancing.simbal.coef=0.2", "optim.lr=2e-3")]
    arms += [("balancing=simbal", f"balancing.simbal.coef={coef}", "optim.lr=1e-3") for coef in (0.1, 0.2)]
    specs = [small_spec(*arm) for arm in (reversed(arms) if reverse else arms)]
    columns = label_columns(specs)
    assert {short_label(label_of(spec, columns)) for spec in specs} == {
        "frozen lr=0.001",
        "simbal lr=0.002 coef=0.2",
        "simbal lr=0.001 coef=0.1",
        "simbal lr=0.001 coef=0.2",
    }


def test_an_option_that_follows_from_the_strategy_lengthens_no_name(small_spec):
    def names(*arms):
        specs = [small_spec(*arm.split()) for arm in arms]
        return [short_label(label_of(spec, label_columns(specs))) for spec in specs]

    assert names("balancing=remoe", "balancing=simbal", "balancing=lbl") == ["remoe", "simbal", "lbl"]
    assert names("balancing=remoe", "balancing=lbl", "balancing=lbl router=sigmoid") == [
        "remoe router=relu", "lbl router=softmax", "lbl router=sigmoid",
    ]  # fmt: skip


def test_a_name_has_short_keys_unless_two_strategies_share_them():
    def name(label):
        return short_label({column: Cell(text) for column, text in label.items()})

    one = {"balancing": "lbl", "balancing.lbl.coef": "0.1", "balancing.lbl.scope": "micro", "a.b": ABSENT}
    assert name(one) == "lbl coef=0.1 scope=micro"
    two = {"balancing": "lbl_x", "balancing.lbl.coef": "0.1", "balancing.x.coef": "1", "optim.lr": "0.2"}
    assert name(two) == "lbl_x balancing.lbl.coef=0.1 balancing.x.coef=1 lr=0.2"


def test_arms_are_runs_that_differ_in_the_seed_and_differences_are_paired_by_seed(two_arms):
    baseline, treatment = table_of(two_arms).rows
    assert (baseline.arm.name, baseline.arm.seeds) == ("lbl", [0, 1, 2])
    assert (baseline.summaries["val/ppl"].mean, baseline.summaries["val/ppl"].sd) == (103.0, 2.0)
    assert (treatment.arm.name, treatment.summaries["val/ppl"].n) == ("simbal", 3)
    difference = treatment.differences["val/ppl"]
    logs = [log(97 / 101), log(100 / 103), log(103 / 105)]
    assert (difference.mean, difference.pairs) == (pytest.approx(fmean(logs)), 3)
    assert difference.low == pytest.approx(fmean(logs) - 4.302652730 * stdev(logs) / 3**0.5)  # t(0.975, 2)
    assert not baseline.differences
    assert "tokens_per_second" not in treatment.differences
    baseline, treatment = table_of(two_arms, "simbal").rows
    assert (baseline.arm.name, treatment.differences["val/ppl"].mean > 0) == ("simbal", True)


def test_a_perplexity_without_a_logarithm_is_refused_with_its_run(write_run):
    write_run("lbl", 0)
    run = write_run("simbal", 0, metrics={"val/ppl": 0.0})
    with pytest.raises(UserError, match=f"{run} cannot be compared: val/ppl=0.0"):
        table_of(run.parent)


def test_the_baseline_can_be_one_arm_by_its_name(coefficients):
    first, *others = table_of(coefficients, "simbal coef=0.2").rows
    assert (first.arm.name, first.differences) == ("simbal coef=0.2", {})
    assert {row.arm.name: row.differences["val/ppl"].mean < 0 for row in others} == {
        "lbl": False, "simbal coef=0.1": False, "simbal coef=0.3": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["simbal coef=0.20", "zzz"])
def test_an_unknown_baseline_is_refused_with_the_closest_arm(coefficients, name):
    with pytest.raises(UserError, match=f"baseline={name} .*simbal"):
        report(coefficients, baseline=name)


def test_every_pair_is_compared_and_corrected_over_all_pairs(coefficients):
    table = table_of(coefficients, pairs=True)
    names = ["lbl", *(f"simbal coef=0.{i}" for i in (1, 2, 3))]
    assert [(row.arm.name, row.other.name) for row in table.pairs] == [
        (names[i], names[j]) for i in range(4) for j in range(i)
    ]
    found = [row.differences["val/ppl"] for row in table.pairs]
    assert {one.degrees for one in found} == {(4 - 1) * (3 - 1)}
    assert found[2].mean == pytest.approx(found[1].mean - found[0].mean)
    assert not any(row.differences for row in table.rows)
    assert "for all pairs (Tukey)" in " ".join(notes(table))


def test_label_columns_are_the_differing_keys_and_the_baseline_is_equal_in_all_others(write_run):
    for model in ("tiny", "small"):
        for balancing in ("lbl", "simbal"):
            keys = {"model": model, "model.d_expert": 64 if model == "tiny" else 128}
            folder = write_run(balancing, 0, keys=keys, metrics={"val/ppl": 1.0 if balancing == "lbl" else 2.0}).parent
    write_run("simbal", 0, keys={"model": "tiny", "balancing.simbal.coef": 1.0})
    write_run("lbl", 7, keys={"model": "tiny", "balancing.lbl.scope": "sequence"})
    table = table_of(folder)
    assert table.columns == ["balancing", "model", "balancing.lbl.scope", "balancing.simbal.coef"]
    assert {row.arm.name: row.other and row.other.name for row in table.rows if row.arm.balancing == "simbal"} == {
        "simbal model=small coef=0.1": "lbl model=small",
        "simbal model=tiny coef=0.1": None,  # two arms could be its baseline
        "simbal model=tiny coef=1.0": None,
    }


@pytest.mark.parametrize(
    ("seed", "keys", "more"),
    [(0, {"optim.lr": 0.1}, None), (1, {}, None), (0, {}, {"balancing.lbl.coef": 0.5})],
    ids=["another key differs", "no shared seed", "two baselines"],
)
def test_an_arm_without_a_baseline_has_no_difference_and_a_note(write_run, seed, keys, more):
    write_run("lbl", 0)
    if more:
        write_run("lbl", 0, keys=more)
    folder = write_run("simbal", seed, keys=keys).parent
    assert not any(row.differences for row in table_of(folder).rows)
    (note,) = notes_of(folder, "No difference for simbal")
    assert "balancing=lbl" in note


def test_several_baseline_keys_give_no_difference_unless_one_is_chosen(write_run):
    write_run("lbl", 0)
    folder = write_run("simbal", 0, keys={"baseline": "none"}).parent
    assert notes_of(folder, "choose one with baseline=")
    assert table_of(folder, "lbl").rows[1].differences


def test_a_number_that_some_runs_lack_counts_only_the_seeds_that_have_it(write_run):
    write_run("none", 0, metrics={"val/ppl": 1.0, "val/max_vio": None})
    table = table_of(write_run("none", 1, metrics={"val/ppl": 1.0, "val/max_vio": 0.5}).parent)
    assert table.rows[0].summaries["val/max_vio"].n == 1
    assert "0.500 (n=1)" in sections.means(table).lines[0]


def test_the_conclusion_is_read_off_the_interval(write_arm, write_run):
    def write(name, shift, scale=1.0):
        noise = (0.012, -0.012, 0.004, -0.004)
        return write_arm(name, *(20 * math.exp(shift + scale * one) for one in noise))

    def found(**options):
        rows = table_of(folder, **options).compared
        return {row.arm.name: row.differences["val/ppl"] for row in rows}

    write("lbl", 0.0, 0.0)
    write("simbal", -0.05)
    write("uniform", 0.01)
    folder = write("ortho_init", 0.0, 0.25)
    words = {name: one.conclusion for name, one in found(margin=0.04).items()}
    assert words == {"simbal": "better", "uniform": "equivalent", "ortho_init": "equivalent"}
    for difference in found().values():
        assert ("better" in difference.conclusion) == (difference.high < 0) == (difference.p < 0.05)
    assert found(margin=0.001)["ortho_init"].conclusion == "not resolved"
    write_run("lbl", 9, keys={"equivalence_margin": 0.5})
    assert found()["ortho_init"].conclusion == "not resolved"
    assert notes_of(folder, "choose one with equivalence_margin=")


def test_loss_perplexity_and_bits_per_byte_have_the_same_word(write_run):
    for name, shift in (("lbl", 0.0), ("simbal", -0.01), ("lf", -0.1)):
        for seed, noise in enumerate((0.01, -0.01, 0.005, -0.005, 0.0)):
            loss = 3 + shift + noise * (name != "lbl")
            metrics = {"val/loss": loss, "val/ppl": math.exp(loss), "val/bpb": loss / 3}
            folder = write_run(name, seed, metrics=metrics).parent
    table = table_of(folder, metrics=choose_columns(["loss", "ppl", "bpb"], collect(folder)))
    words = [[one.conclusion for one in row.differences.values()] for row in table.compared]
    assert sorted(words) == [["better"] * 3, ["equivalent"] * 3]


def test_an_identical_arm_is_called_identical_and_adds_nothing_to_the_noise(write_arm):
    values = (20.0, 20.5, 20.2, 20.1)
    write_arm("lbl", *values)
    write_arm("simbal", 19.0, 19.6, 19.1, 19.2)
    before = table_of(write_arm("lf", 21.0, 21.6, 21.3, 21.4)).compared
    after = table_of(write_arm("ortho_init", *values)).compared
    found = {row.arm.name: row.differences["val/ppl"] for row in after}
    assert found.pop("ortho_init").conclusion == "identical"
    assert found == {row.arm.name: row.differences["val/ppl"] for row in before}


@pytest.mark.parametrize(
    ("low", "high", "metric", "word"),
    [
        (-0.03, -0.002, "val/loss", "better"),
        (-0.03, -0.0009, "val/loss", "barely better"),
        (0.0009, 0.03, "val/loss", "barely worse"),
        (-0.0253, 0.01, "val/loss", "barely equivalent"),
        (-0.01, 0.01, "val/loss", "equivalent"),
        (0.01, 0.02, "val/loss", "worse"),  # within the margin too: a difference takes precedence
        (-0.03, 0.01, "val/loss", "not resolved"),
        (0.0001, 0.0002, "val/seu", "higher"),
        (-1.0, -0.5, "val/unique_experts", "worse"),
    ],
)
def test_words_of_intervals(low, high, metric, word):
    (found,) = (one for one in NUMBERS if one.key == metric)
    assert conclusion_word(low, high, found, 0.026) == word
    assert "equivalent" not in conclusion_word(low, high, found, None)


def test_runs_that_never_reach_the_peak_rate_or_the_unigram_loss_have_no_conclusions(write_run):
    def write(**fields):
        for name, mean in {"lbl": 5.0, "simbal": 4.0, "lf": 6.8}.items():
            for seed, noise in enumerate((0.0, 0.01, 0.04)):
                loss = mean + noise * (name != "lbl")
                data = {"text": "a", "tokens": "b", "source": "", "ngrams": {"losses": {"1": 6.6, "2": 3.9}}}
                metrics = {"val/loss": loss, "val/ppl": math.exp(loss)}
                folder = write_run(name, seed, metrics=metrics, data=data, **fields).parent
        return folder

    folder = write()
    words = {row.arm.name: row.differences["val/ppl"].conclusion for row in table_of(folder).compared}
    assert words == {"simbal": "better", "lf": ""}
    assert notes_of(folder, "No conclusions for lf: ", "unigram")
    table = table_of(write(steps=10))
    assert {row.differences["val/ppl"].conclusion for row in table.compared} == {""}
    assert {row.differences["val/ppl"].low for row in table.compared} == {None}
    assert notes_of(folder, "No conclusions for lbl, lf, simbal: ", "warm-up of 10")


def test_ngram_models_are_rows_of_the_table_and_a_baseline_close_to_them_is_noted(write_run):
    for seed in range(2):
        data = {"text": "a", "tokens": "b", "source": "", "ngrams": {"losses": {"1": 6.0, "2": 4.0, "3": 3.2}}}
        metrics = {"val/loss": 3.1, "val/ppl": math.exp(3.1), "val/bpb": 1.55}
        folder = write_run("lbl", seed, metrics=metrics, data=data).parent
    lines = sections.means(table_of(folder, metrics=choose_columns(["loss", "ppl", "bpb"], collect(folder)))).lines
    assert [line[0] for line in lines] == ["lbl", "unigram", "bigram", "3-gram"]
    assert lines[-1][3:] == ["3.2000", f"{math.exp(3.2):.3f}", "1.6000"]
    assert notes_of(folder, "0.10 nats below", "3-gram model's", "learn n-grams")


def test_notes_say_what_few_seeds_cannot_show(write_arm):
    values = {"lbl": (100.0, 101.0, 99.0), "simbal": (97.0, 99.0, 96.0)}
    for seeds, word in ((1, "single seed"), (3, "3 seeds are few")):
        for name, perplexities in values.items():
            folder = write_arm(name, *perplexities[:seeds])
        assert notes_of(folder, word)
        if seeds == 1:
            cells = ["-3.0%", "—", "not resolved", "—", "—", "—", "—", "—", "1"]
            assert sections.differences(table_of(folder)).lines[0][2:] == cells


def test_routers_without_a_gradient_from_the_language_model_loss_are_noted(write_arm):
    one = {"model.top_k": 1}
    write_arm("lbl", 20.0, 21.0, keys=one | {"router.renormalize": False})
    write_arm("lf", 20.0, 21.0, keys=one | {"router.gating": "relu"})
    write_arm("simbal", 20.0, 21.0)
    folder = write_arm("uniform", 20.0, 21.0, keys=one | UNIFORM)
    assert notes_of(folder, "gradient") == []
    (note,) = notes_of(write_arm("simbal", 20.0, 21.0, keys=one), "gradient")
    assert "In simbal gating=softmax renormalize=True top_k=1 a token" in note


def test_arms_that_differ_in_experts_per_token_are_noted(write_run):
    for name, number in (("lbl", None), ("simbal", 4.02), ("remoe", 3.2)):
        measured = {} if number is None else {"val/experts_per_token": number}
        run = write_run(name, keys={"model.top_k": 4}, metrics={"val/ppl": 100.0} | measured)
    assert notes_of(run.parent, "differ in compute", "4.00 in lbl, 3.20 in remoe, 4.02 in simbal")
    next(run.parent.glob("remoe*/record.json")).unlink()
    assert not notes_of(run.parent, "compute")


def test_a_table_of_learned_routers_needs_a_control_and_one_arm_or_a_dense_one_does_not(write_arm):
    assert notes_of(write_arm("lbl", 20.0, 21.0), "control") == []
    assert notes_of(write_arm("none", 20.0, 21.0, keys={"model.num_experts": 0}), "control") == []
    write_arm("none", 22.0, 23.0, keys=NONE)
    (note,) = notes_of(write_arm("simbal", 19.0, 20.5), "control")
    assert "balancing=frozen" in note


def test_a_control_that_is_clearly_worse_is_not_noted(write_arm):
    write_arm("uniform", 30.0, 31.1, 29.2, keys=UNIFORM)
    folder = write_arm("lbl", 20.0, 20.9, 19.5)
    assert [is_control(row.arm) for row in table_of(folder).rows] == [False, True]
    assert notes_of(folder, "control") == []


@pytest.mark.parametrize("perplexities", [(20.1, 20.8, 19.9), (10.0, 10.9, 9.5), (30.0,)])
def test_a_control_that_is_not_significantly_worse_is_noted_with_the_learned_routers(write_arm, perplexities):
    write_arm("uniform", *perplexities, keys=UNIFORM)
    write_arm("simbal", 5.0, 5.2, 4.9)
    folder = write_arm("lbl", 20.0, 20.9, 19.5)
    (note,) = notes_of(folder, "control uniform is not significantly worse in perplexity than lbl")
    assert ("simbal" in note) == (len(perplexities) == 1)


def test_a_control_is_compared_with_arms_of_equal_config_or_else_with_all(write_arm):
    write_arm("uniform", 20.0, 21.0, keys=UNIFORM | {"optim.lr": 0.1})
    assert notes_of(write_arm("lbl", 20.0, 21.0), "control", "than lbl lr=")
    assert notes_of(write_arm("simbal", 20.0, 21.0, keys={"optim.lr": 0.1}), "control", "than simbal lr=0.1:")


def test_the_best_arms_are_shown_with_their_baselines(write_run):
    for place, lr in enumerate((0.1, 0.2, 0.3)):
        folder = write_run("lbl", keys={"optim.lr": lr}, metrics={"val/loss": 5.0 + place}).parent
        write_run("simbal", keys={"optim.lr": lr}, metrics={"val/loss": 4.0 - place})
    table = table_of(folder)
    assert table.best_arms(6) is table
    best = ["lbl lr=0.2", "lbl lr=0.3", "simbal lr=0.2 coef=0.1", "simbal lr=0.3 coef=0.1"]
    assert [row.arm.name.removesuffix(" coef=0.1") for row in table.best_arms(4).rows] == [
        name.removesuffix(" coef=0.1") for name in best
    ]
    pairs = table_of(folder, pairs=True).best_arms(2).pairs
    assert [(row.arm.balancing, row.other.name) for row in pairs] == [("simbal", "lbl lr=0.3")]


def test_power_counts_the_missing_pairs_and_their_hours(write_run):
    for name in ("lbl", "simbal"):
        for seed, shift in enumerate((-0.058, 0.0, 0.058)):
            ppl = 20 * math.exp(shift if name == "simbal" else 0.0)
            run = write_run(name, seed, metrics={"val/ppl": ppl}, seconds=1800.0)
    section = sections.power(table_of(run.parent))
    assert section.lines == [["simbal", "perplexity ↓", "0.0580", "3", "39 (39.0 h)", "52 (52.0 h)"]]


def test_baselines_have_their_own_noise_and_power_uses_the_same_critical_values(write_run):
    rng = np.random.default_rng(0)
    for lr, spread in ((0.1, 0.01), (0.2, 0.05)):
        for name in ("lbl", "simbal", "lf"):
            for seed in range(4):
                ppl = math.exp(3 + spread * rng.standard_normal())
                run = write_run(name, seed, keys={"optim.lr": lr}, metrics={"val/ppl": ppl}, seconds=1800.0)
    table = table_of(run.parent)
    assert len(table.compared) == 4
    assert "Noise is pooled over arms with the same baseline after" in explanations(table)[0]
    for row in table.compared:
        detectable = row.differences["val/ppl"].detectable
        for factor, is_enough in ((1.001, True), (0.999, False)):
            lines = sections.power(replace(table, margin=factor * detectable)).lines
            (line,) = [line for line in lines if line[0] == row.arm.name]
            assert line[4].startswith("0 ") == is_enough
