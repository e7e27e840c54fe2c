"""Every number of results/ that has a source is that of its source, and one changed digit is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.report.reproduce.check_table import check_table, tables
from simbal.report.reproduce.printed import agrees, numbers
from simbal.report.reproduce.verify import verify
from tests.conftest import CONF

RESULTS = CONF.parent / "results"
OTHERS = ("over documents", "saved by slope", "its interval")  # columns of what rows.csv has not: documents and curves
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/rows.csv"))


@pytest.mark.parametrize("name", STUDIES)
def test_the_tables_of_the_results_follow_from_their_rows(name):
    checked, text = check_table(RESULTS / name), (RESULTS / name / "table.md").read_text()
    lines = [line for _, table in tables(text) for line in table]
    assert checked.wrong == []
    cells = [line.get(heading, "") for line in lines for heading in OTHERS]
    assert sorted(checked.unverified) == sorted(number for cell in cells for number in numbers(cell))
    assert checked.verified >= 18


@pytest.fixture
def copy(tmp_path) -> Path:
    """The results of one study."""
    shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_study_as_it_is_passes_and_says_what_it_cannot_know(copy, capsys):
    verify(copy)
    out = capsys.readouterr().out
    assert "collapse/table.md: 249 numbers verified, 20 not\n" in out
    assert "collapse/README.md: 70 numbers verified, 11 not\n" in out
    assert "verified: 761 numbers\n" in out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.5860 ± 0.0650", "3.5861 ± 0.0650"),
        ("3.5860 ± 0.0650", "3.5860 ± 0.0651"),
        ("| lbl | 5 | 0-4", "| lbl | 6 | 0-4"),
        ("| lbl | 5 | 0-4", "| lbl | 5 | 0-5"),
        ("4,650 ± 500 (n=4)", "4,650 ± 500 (n=5)"),
        ("+0.1590", "+0.1591"),
        ("+0.1590", "-0.1590"),
        ("+0.0653 to", "+0.0654 to"),
        ("to +0.2527", "to +0.2427"),
        ("worse | 0.1269", "worse | 0.1268"),
        ("worse | 0.1269", "better | 0.1269"),
        ("worse | 0.1269", "equivalent | 0.1269"),
        ("not resolved |", "higher |"),
        ("| 0.009 | 0.037 | +2.11 | 0.003", "| 0.010 | 0.037 | +2.11 | 0.003"),
        ("| 0.009 | 0.037 | +2.11 | 0.003", "| 0.009 | 0.038 | +2.11 | 0.003"),
        ("| 0.009 | 0.037 | +2.11 | 0.003", "| 0.009 | 0.037 | +2.12 | 0.003"),
        ("| 0.009 | 0.037 | +2.11 | 0.003", "| 0.009 | 0.037 | +2.11 | 0.002"),
        ("| 0.003 | 5 |", "| 0.003 | 4 |"),
        ("| simbal | validation loss ↓", "| simbals | validation loss ↓"),
        ("128.0 ± 0.0", "—"),
        ("in 4 of 5 seeds |", "in 3 of 5 seeds |"),
        ("| simbal | — | — | — | in 1", "| simbal | 97.1% | — | — | in 1"),
    ],
)
def test_one_changed_digit_of_a_table_is_found(copy, capsys, old, new):
    replace(copy / "collapse/table.md", old, new)
    with pytest.raises(UserError, match="1 numbers or sentences of .* are not as its rows have them|[2-9] numbers"):
        verify(copy)
    assert "WRONG" in capsys.readouterr().out


def test_a_line_that_is_gone_is_found(copy, capsys):
    file = copy / "collapse/table.md"
    lines = file.read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if line.startswith("|  | "))
    file.write_text("".join(lines[:last] + lines[last + 1 :]))
    with pytest.raises(UserError, match="numbers or sentences of .* are not as its rows have them"):
        verify(copy)
    assert "table.md has no line for " in capsys.readouterr().out


def test_equivalence_is_that_within_the_margin_of_the_table(tmp_path):
    study = shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    replace(study / "table.json", '"equivalence_margin": 0.026', '"equivalence_margin": 9.0')
    assert set(check_table(study).wrong) == {"val/loss: not resolved is printed, and the rows give equivalent"}


def test_a_changed_word_of_a_text_is_found(copy, capsys):
    replace(copy / "collapse/README.md", "in every seed", "in each seed")
    with pytest.raises(UserError, match="^1 numbers or sentences"):
        verify(copy)
    assert "is not as README.md.jinja and the rows have it" in capsys.readouterr().out


def test_a_changed_digit_of_the_rows_is_found(copy):
    replace(copy / "collapse/rows.csv", "3.437920367246272", "3.537920367246272")
    assert len(check_table(copy / "collapse").wrong) > 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| 0.007 | 0.007 | -1.79 |", "| 0.007 | 0.008 | -1.79 |"),
        ("93.2%", "93.3%"),
        ("+6.8%", "+6.9%"),
        ("+1.5% to", "+1.6% to"),
        ("9.91e-01", "9.92e-01"),
    ],
)
def test_corrections_for_several_arms_and_tokens_up_to_the_baselines_loss_follow_from_the_rows(tmp_path, old, new):
    study = shutil.copytree(RESULTS / "significance_retuned_whole", tmp_path / "significance_retuned_whole")
    replace(study / "table.md", old, new)
    (wrong,) = check_table(study).wrong
    assert f"{numbers(new)[-1 if '|' not in new else 1]} is printed, and the rows give " in wrong


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "collapse" / name).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("rows.csv"), "there is no .*rows.csv: reproduce the study"),
        (without("table.json"), "is not that of a study"),
        (without("table.md"), "table.md or table.json is not that of a study"),
        (without("README.md"), "README.md cannot be read: make figures writes it"),
        (lambda folder: (folder / "collapse/rows.csv").write_text("arm,seed\na,b\n"), "does not hold the numbers"),
    ],
)
def test_what_is_missing_or_broken_is_a_sentence(copy, damage, says):
    damage(copy)
    with pytest.raises(UserError, match=says):
        verify(copy)


def test_a_folder_without_a_study_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no study"):
        verify(tmp_path)


@given(value=st.floats(-1e6, 1e6), digits=st.integers(0, 6), style=st.sampled_from("fe"))
def test_a_number_agrees_with_what_it_was_printed_from_and_not_with_its_neighbour(value, digits, style):
    text = f"{value:+,.{digits}f}" if style == "f" else f"{value:.{digits}e}"
    assert numbers(text) == [text]
    assert agrees(text, value)
    printed = float(text.replace(",", ""))
    unit = 10.0**-digits if style == "f" else 10.0 ** (int(text.partition("e")[2]) - digits)
    assume(abs(abs(printed - value) - unit / 2) > unit / 1000)  # halfway, either is right
    assert not agrees(text, value + unit)
    assert not agrees(text, value - unit)


def test_small_p_are_only_below():
    assert agrees("<0.001", 0.0009)
    assert not agrees("<0.001", 0.001)


def test_numbers_are_found_in_a_text_and_letters_are_none():
    assert numbers("27.9 ± 1.1 (-1.18 to +2.88), 1,536,000 tokens, 9.6e-8; seeds 0-4, bf16, v1.2") == [
        "27.9", "1.1", "-1.18", "+2.88", "1,536,000", "9.6e-8", "0", "4",
    ]  # fmt: skip
