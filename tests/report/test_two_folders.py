"""Two sweeps, or two runs, in one table: what differs comes first, and what cannot be compared is said."""

import shutil
from math import exp

import pytest

from simbal.cli.commands import report
from simbal.errors import UserError
from simbal.report import sections
from simbal.report.report import report_both
from simbal.report.two_folders import build_both, read_sides, what_differs, why_not

CODE = {"version": "0.1.0", "commit": "a" * 40, "dirty": False}


@pytest.fixture
def write(write_run):
    """`write("old", "lbl", seed, ppl)`: a run in outputs/old."""

    def run(name, balancing, seed=0, ppl=100.0, **fields):
        keys = {"name": name} | fields.pop("keys", {})
        return write_run(balancing, seed, keys=keys, metrics={"val/ppl": ppl}, **fields).parent

    return run


@pytest.fixture
def same_arms(write):
    """Two sweeps of the same two arms, which differ in the learning rate."""
    for seed in range(3):
        for balancing, worse in (("lbl", 1.0), ("simbal", 0.0)):
            old = write("old", balancing, seed, 100 + worse + seed, code=CODE)
            rate = {"optim.lr": 0.5}
            new = write("new", balancing, seed, 90 + worse + seed, keys=rate, code=CODE | {"commit": "b" * 40})
    return old, new


def differing(old, new):
    return {key: tuple(values) for key, *values in what_differs(*read_sides(old, new)).lines}


def both(old, new, baseline=None, pairs=False):
    return build_both(*read_sides(old, new), baseline, None, False, None, pairs)


def compared(table):
    return {(row.arm.name, row.other.name): row.differences["val/ppl"].pairs for row in table.compared}


def test_what_differs_has_both_values_and_nothing_else(same_arms):
    assert differing(*same_arms) == {"optim.lr": ("0.002", "0.5"), "code.commit": ("a" * 16, "b" * 16)}


def test_arms_that_differ_in_a_key_have_it_in_their_label_and_are_compared_with_the_baseline(same_arms):
    table = both(*same_arms)
    assert [row.arm.name for row in table.rows] == ["lbl lr=0.002", "simbal lr=0.002", "lbl lr=0.5", "simbal lr=0.5"]
    assert compared(table) == {("simbal lr=0.002", "lbl lr=0.002"): 3, ("simbal lr=0.5", "lbl lr=0.5"): 3}


@pytest.fixture
def equal_arms(write):
    """A sweep that was done again, with one arm more and another seed."""
    for seed in range(3):
        old = write("old", "lbl", seed, 100 + seed, code=CODE)
        new = write("new", "lbl", seed + 1, 99 + seed, code=CODE | {"dirty": True})
    write("new", "simbal", 1, 90)
    return old, new


def test_arms_that_are_equal_are_told_apart_by_folder_and_compared_with_each_other(equal_arms):
    table = both(*equal_arms)
    assert [row.arm.name for row in table.rows] == ["lbl folder=old", "lbl folder=new", "simbal folder=new"]
    assert compared(table) == {("lbl", "lbl"): 2}
    assert [line[0] for line in sections.differences(table).lines] == ["lbl"]
    (row,) = table.compared
    assert row.differences["val/ppl"].mean < 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"data": {"source": "synthetic", "text": "x", "tokens": "y", "versions": {"numpy": "2.0"}}},
            "data.text is 'a' in the first",
        ),
        ({"steps": 800}, "the first was trained for 400 steps and the second for 800"),
        ({"tokens": 5}, "a run of the first was trained on 819,200 tokens, and one of the second on 5"),
        ({"definitions": {"val/ppl": "2 to the loss"}}, "definitions.val/ppl is 'exp of the loss' in the first"),
    ],
)
def test_what_cannot_be_compared_is_said_after_what_differs_and_no_table_is_shown(write, capsys, fields, said):
    old, new = write("old", "lbl"), write("new", "lbl", **fields)
    assert said in why_not(*read_sides(old, new))
    with pytest.raises(UserError, match="old and new cannot be compared: "):
        report_both(old, new)
    out = capsys.readouterr().out
    assert "what differs between old and new" in out
    assert "perplexity" not in out


def test_a_copied_run_is_no_pair_however_two_folders_are_compared(write):
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


def test_the_command_line_compares_two_and_writes_nothing(equal_arms, capsys):
    before = {path.name for folder in equal_arms for path in folder.iterdir()}
    report([*map(str, equal_arms), "columns=[ppl]"])
    out = capsys.readouterr().out
    assert out.index("what differs between old and new") < out.index("paired difference of equal arms, new - old,")
    assert "code.dirty" in out
    assert {path.name for folder in equal_arms for path in folder.iterdir()} == before
