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
    shutil.copytree(RESULTS / "significance", tmp_path / "significance")
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_study_as_it_is_passes_and_says_what_it_cannot_know(copy, capsys):
    verify(copy)
    out = capsys.readouterr().out
    assert "significance/table.md: 96 numbers verified\n" in out
    assert "significance/README.md: 30 numbers verified, 19 not\n" in out
    assert "verified: 126 numbers\n" in out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("27.942 ± 1.122", "27.943 ± 1.122"),
        ("27.942 ± 1.122", "27.942 ± 1.121"),
        ("| lbl | 5 | 0-4", "| lbl | 6 | 0-4"),
        ("| lbl | 5 | 0-4", "| lbl | 5 | 0-5"),
        ("9.63e-08", "9.53e-08"),
        ("+0.848", "+0.849"),
        ("+0.848", "-0.848"),
        ("-1.182 to", "-1.181 to"),
        ("to +2.878", "to +2.868"),
        ("| 0.311 | +0.52 | 0.250", "| 0.312 | +0.52 | 0.250"),
        ("| 0.311 | +0.52 | 0.250", "| 0.311 | +0.53 | 0.250"),
        ("| 0.311 | +0.52 | 0.250", "| 0.311 | +0.52 | 0.251"),
        ("| 0.250 | 5 |", "| 0.250 | 4 |"),
        ("| simbal | perplexity ↓", "| simbals | perplexity ↓"),
        ("64.0 ± 0.0", "—"),
        ("in 3 of 5 seeds |", "in 2 of 5 seeds |"),
        ("| simbal | — | — | — | 5 |", "| simbal | 97.1% | — | — | 5 |"),
    ],
)
def test_one_changed_digit_of_a_table_is_found(copy, capsys, old, new):
    replace(copy / "significance/table.md", old, new)
    with pytest.raises(UserError, match="1 numbers or sentences of .* are not as its rows have them|[2-9] numbers"):
        verify(copy)
    assert "WRONG" in capsys.readouterr().out


def test_a_changed_word_of_a_text_is_found(copy, capsys):
    replace(copy / "significance/README.md", "lower in each seed", "lower in every seed")
    with pytest.raises(UserError, match="^1 numbers or sentences"):
        verify(copy)
    assert "is not as README.md.jinja and the rows have it" in capsys.readouterr().out


def test_a_changed_digit_of_the_rows_is_found(copy):
    replace(copy / "significance/rows.csv", "27.967527430531238", "27.867527430531238")
    assert len(check_table(copy / "significance").wrong) > 4


def test_holm_is_corrected_for_all_arms_of_a_number(tmp_path):
    shutil.copytree(RESULTS / "lbl_fairness", tmp_path / "lbl_fairness")
    replace(tmp_path / "lbl_fairness/table.md", "| 0.020 | 0.090 |", "| 0.020 | 0.091 |")
    (wrong,) = check_table(tmp_path / "lbl_fairness").wrong
    assert wrong.startswith("val/max_vio p (Holm): 0.091 is printed, and the rows give 0.0")


def test_a_number_that_some_seeds_lack_is_counted(tmp_path):
    shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    replace(tmp_path / "collapse/table.md", "(n=4)", "(n=5)")
    (wrong,) = check_table(tmp_path / "collapse").wrong
    assert wrong.startswith("lbl train/steps_to_settle: 5 is printed, and the rows give 4")


@pytest.mark.parametrize(("old", "new"), [("84.5%", "84.6%"), ("+15.5%", "+15.4%"), ("-2.7% to", "-2.8% to")])
def test_tokens_up_to_the_baselines_loss_follow_from_the_rows_too(tmp_path, old, new):
    shutil.copytree(RESULTS / "lbl_fairness", tmp_path / "lbl_fairness")
    replace(tmp_path / "lbl_fairness/table.md", old, new)
    (wrong,) = check_table(tmp_path / "lbl_fairness").wrong
    assert wrong.startswith("lbl coef=0.01 scope=sequence")


def test_a_column_that_the_rows_do_not_decide_is_not_verified(copy):
    replace(copy / "significance/table.md", "| pairs |", "| pairs | over documents |")
    replace(copy / "significance/table.md", "| 0.250 | 5 |", "| 0.250 | 5 | 7.7 |")
    replace(copy / "significance/table.md", "| not reached |", "| not reached | saved by slope |")
    replace(copy / "significance/table.md", "in 3 of 5 seeds |", "in 3 of 5 seeds | 8.8% |")
    checked = check_table(copy / "significance")
    assert (checked.wrong, checked.unverified) == ([], ["7.7", "8.8"])


@pytest.mark.parametrize(("printed", "wrong"), [("2.75", 0), ("2.76", 1)])
def test_the_detectable_difference_follows_from_the_rows(copy, printed, wrong):
    replace(copy / "significance/table.md", "| pairs |", "| pairs | detectable |")
    replace(copy / "significance/table.md", "| 0.250 | 5 |", f"| 0.250 | 5 | {printed} |")
    assert len(check_table(copy / "significance").wrong) == wrong


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "significance" / name).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("rows.csv"), "there is no .*rows.csv: reproduce the study"),
        (without("table.json"), "is not that of a study"),
        (without("table.md"), "holds no study"),
        (without("README.md"), "README.md cannot be read: make figures writes it"),
        (lambda folder: (folder / "significance/rows.csv").write_text("arm,seed\na,b\n"), "does not hold the numbers"),
    ],
)
def test_what_is_missing_or_broken_is_a_sentence(copy, damage, says):
    damage(copy)
    with pytest.raises(UserError, match=says):
        verify(copy)


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
