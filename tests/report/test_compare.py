"""Comparisons of two sweeps or runs show the settings that differ, then one table or the reason for its absence."""

import shutil
from dataclasses import replace
from math import exp

import pytest

from simbal.cli.commands import report
from simbal.errors import UserError
from simbal.report import sections
from simbal.report.compare import build_both, differing_settings, read_sides
from simbal.report.notes import explanations
from simbal.report.report import report_both

CODE = {"version": "0.1.0", "commit": "a" * 40, "dirty": False}


@pytest.fixture
def write(write_run):
    """`write("old", "lbl", seed, ppl)`: a run in outputs/old."""

    def run(name, balancing, seed=0, ppl=100.0, **fields):
        keys = {"name": name} | fields.pop("keys", {})
        return write_run(balancing, seed, keys=keys, metrics={"val/ppl": ppl}, **fields).parent

    return run


def both(old, new, baseline=None, **options):
    return build_both(*read_sides(old, new), baseline, **options)


def compared(table):
    return {(row.arm.name, row.other.name): row.differences["val/ppl"].pairs for row in table.compared}


def test_arms_with_another_key_are_labeled_by_it_and_compared_with_their_baseline(write):
    for seed in range(3):
        for balancing, worse in (("lbl", 1.0), ("simbal", 0.0)):
            old = write("old", balancing, seed, 100 + worse + seed, code=CODE)
            rate = {"optim.lr": 0.5}
            new = write("new", balancing, seed, 90 + worse + seed, keys=rate, code=CODE | {"commit": "b" * 40})
    differing = {key: tuple(values) for key, *values in differing_settings(*read_sides(old, new)).lines}
    assert differing == {"optim.lr": ("0.002", "0.5"), "code.commit": ("a" * 16, "b" * 16)}
    table = both(old, new)
    assert {row.arm.name for row in table.rows} == {"lbl lr=0.002", "simbal lr=0.002", "lbl lr=0.5", "simbal lr=0.5"}
    assert compared(table) == {("simbal lr=0.002", "lbl lr=0.002"): 3, ("simbal lr=0.5", "lbl lr=0.5"): 3}


@pytest.fixture
def equal_arms(write):
    """A sweep that was run again, with one more arm and other seeds."""
    for seed in range(3):
        old = write("old", "lbl", seed, 100 + seed, code=CODE)
        new = write("new", "lbl", seed + 1, 99 + seed, code=CODE | {"dirty": True})
        write("new", "simbal", seed + 1, 90 + seed)
    return old, new


def test_power_uses_the_critical_values_of_equal_arms(write):
    for seed, noise in enumerate((0.0, 0.01, 0.03)):
        for name, shift in (("lbl", noise), ("simbal", -noise), ("lf", noise**2)):
            old, new = (
                write("old", name, seed, 100.0, seconds=1800.0),
                write("new", name, seed, 100 * exp(shift), seconds=1800.0),
            )
    table = both(old, new)
    assert "for all comparisons (Dunnett)" in explanations(table)[0]
    for place, row in enumerate(table.compared):
        detectable = row.differences["val/ppl"].detectable
        needed = [sections.power(replace(table, margin=factor * detectable)).lines for factor in (1.001, 0.999)]
        assert [lines[place][4].startswith("0 ") for lines in needed] == [True, False]


def test_equal_arms_are_labeled_by_folder_and_compared_with_each_other(equal_arms):
    table = both(*equal_arms)
    assert {row.arm.name for row in table.rows} == {"lbl folder=old", "lbl folder=new", "simbal folder=new"}
    assert compared(table) == {("lbl", "lbl"): 2}
    assert [line[0] for line in sections.differences(table).lines] == ["lbl"]
    assert table.compared[0].differences["val/ppl"].mean < 0


def test_with_a_baseline_arms_are_compared_within_their_folder(equal_arms):
    assert compared(both(*equal_arms, baseline="lbl")) == {("simbal folder=new", "lbl folder=new"): 3}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"steps": 800}, "the first was trained for 400 steps and the second for 800"),
        ({"tokens": 5}, "the first was trained on 819,200 tokens and the second on 5"),
    ],
)
def test_incomparable_folders_have_a_reason_and_no_table(write, capsys, fields, reason):
    old, new = write("old", "lbl"), write("new", "lbl", **fields)
    with pytest.raises(UserError, match=f"old and new cannot be compared: {reason}"):
        report_both(old, new)
    out = capsys.readouterr().out
    assert "settings that differ between old and new" in out
    assert "perplexity" not in out


def test_a_copied_run_is_not_paired_with_itself(write):
    """Two of four seeds are copies, and two were run again with a perplexity 20% higher."""
    for seed in range(4):
        old = write("old", "lbl", seed, 100 + seed)
    new = shutil.copytree(old, old.parent / "new")
    for seed in (2, 3):
        shutil.rmtree(next(new.glob(f"*seed{seed}*")))
        write("new", "lbl", seed, (100 + seed) * (1.2 + 0.001 * seed))
    for options in ({}, {"baseline": "lbl folder=old"}, {"pairs": True}):
        (row,) = both(old, new, **options).compared
        found = row.differences["val/ppl"]
        assert (found.pairs, found.conclusion) == (2, "worse")
        assert exp(found.mean) == pytest.approx(1.2025, abs=1e-5)
    assert [len(row.arm.runs) for row in both(old, new).rows] == [4, 4]


def test_the_command_compares_two_folders_and_writes_nothing(equal_arms, capsys):
    before = {path.name for folder in equal_arms for path in folder.iterdir()}
    report([*map(str, equal_arms), "columns=[ppl]"])
    out = capsys.readouterr().out
    assert out.index("settings that differ between old and new") < out.index("equal arms, new - old")
    assert "code.dirty" in out
    assert {path.name for folder in equal_arms for path in folder.iterdir()} == before
