"""What a table says of few seeds and of its tests, and how the tests look at every width."""

import pytest

from simbal.report import sections
from simbal.report.collect import collect
from simbal.report.notes import notes
from simbal.report.table import build

FIVE = {"lbl": (100.0, 101.0, 99.0, 102.0, 98.0), "simbal": (97.0, 99.0, 96.0, 98.5, 95.5)}


@pytest.fixture
def write_arms(write_run):
    """Writes arms of so many seeds and returns their table."""

    def write(seeds, *others):
        for name, values in {**FIVE, **dict.fromkeys(others, FIVE["simbal"][::-1])}.items():
            for seed, ppl in enumerate(values[:seeds]):
                folder = write_run(name, seed, metrics={"val/ppl": ppl, "val/max_vio": 0.5}).parent
        return build("t", collect(folder))

    return write


def test_five_pairs_are_said_to_be_too_few_for_tests_without_a_distribution(write_arms):
    (note,) = [note for note in notes(write_arms(5)) if "Wilcoxon" in note]
    assert note.startswith("5 seeds are few")
    assert "cannot give p below 0.0625" in note


def test_two_pairs_are_said_to_have_one_degree_of_freedom(write_arms):
    assert any("2 pairs has 1 degree of freedom" in note for note in notes(write_arms(2)))
    assert not any("degree of freedom" in note for note in notes(write_arms(3)))


def test_one_pair_has_dashes_for_every_test(write_arms):
    table = write_arms(1)
    assert sections.differences(table).lines[0][2:] == ["-3.0%", "—", "not resolved", "—", "—", "—", "—", "1"]
    assert not any("p is two-sided" in note for note in notes(table))


def test_one_pair_of_arms_with_several_seeds_is_said_to_have_no_interval(write_run):
    for seed in range(3):
        write_run("lbl", seed)
        folder = write_run("simbal", seed + 2).parent
    assert any("one pair of seeds no interval" in note for note in notes(build("t", collect(folder), "lbl")))


def test_several_arms_are_corrected_together_and_one_is_not(write_arms):
    single = write_arms(5)
    assert "p (Holm)" not in sections.differences(single).headings
    assert single.rows[1].differences["val/ppl"].p_holm is None
    several = write_arms(5, "lf")
    differences = [row.differences["val/ppl"] for row in several.rows[1:]]
    smaller, larger = sorted(differences, key=lambda difference: difference.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(larger.p, smaller.p_holm))
    assert any(note.startswith("p (Holm) is corrected for the arms") for note in notes(several))


def test_arms_whose_tokens_have_different_numbers_of_experts_are_said_to(write_run):
    for name, number in (("lbl", None), ("simbal", 4.02), ("remoe", 3.2)):
        measured = {} if number is None else {"val/experts_per_token": number}
        run = write_run(name, keys={"model.top_k": 4}, metrics={"val/ppl": 100.0} | measured)
    said = notes(build("t", collect(run.parent)))
    numbers = "4.00 in lbl, 3.20 in remoe, 4.02 in simbal"
    assert f"Arms differ in compute: a token goes to {numbers} experts on average." in said
    for file in run.parent.glob("remoe*/record.json"):
        file.unlink()
    assert not [note for note in notes(build("t", collect(run.parent))) if "compute" in note]
