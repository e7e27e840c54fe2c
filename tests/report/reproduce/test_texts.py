"""The texts of results/ are as their templates and the rows have them, and a template reaches nothing but numbers."""

import shutil
from pathlib import Path
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from simbal.errors import UserError
from simbal.report.conclusion import equivalence_p
from simbal.report.power import pairs_to_resolve
from simbal.report.reproduce.formulas import Paired, Study, shown
from simbal.report.reproduce.printed import agrees
from simbal.report.reproduce.rows import ROWS
from simbal.report.reproduce.texts import TEMPLATE, TEXT, check_text, write_texts
from tests.conftest import CONF

RESULTS = CONF.parent / "results"
TEXTS = sorted(str(file.parent.relative_to(RESULTS)) for file in RESULTS.glob(f"**/{TEMPLATE}"))


@pytest.mark.parametrize("folder", TEXTS)
def test_each_is_as_its_template_and_the_rows_have_it(folder):
    checked = check_text(RESULTS / folder / TEXT, RESULTS)
    assert checked.wrong == []
    assert checked.verified >= 8


def test_every_text_has_a_template():
    assert sorted(str(file.parent.relative_to(RESULTS)) for file in RESULTS.glob(f"**/{TEXT}")) == TEXTS


def test_the_table_at_the_front_is_from_them_too():
    rows = [line for line in (CONF.parent / TEXT).read_text().splitlines() if line.startswith("|") and "±" in line]
    assert len(rows) >= 2
    assert set(rows) <= set((RESULTS / TEXT).read_text().splitlines())


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(RESULTS / "significance", tmp_path / "significance")
    return tmp_path


def written(copy: Path, template: str) -> str:
    (copy / "significance" / TEMPLATE).write_text(template)
    assert write_texts(copy) == [copy / "significance" / TEXT]
    return (copy / "significance" / TEXT).read_text()


def test_a_text_has_its_numbers_from_the_rows_and_says_which_it_has_not(copy):
    loop = "{% for E in 2, %}\n{{ E }}\n{% endfor %}\n"
    text = written(copy, "Of 5 seeds `at 7`: {{ significance.mean_sd('ppl', 'lbl', '.2f') }}.\n" + loop)
    assert text == "Of 5 seeds `at 7`: 27.94 ± 1.12.\n2\n"
    checked = check_text(copy / "significance" / TEXT, copy)
    assert (checked.verified, checked.unverified, checked.wrong) == (2, ["5", "2"], [])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [(TEXT, "27.94 ±", "27.95 ±"), (TEXT, "Not here.", "Yes."), ("rows.csv", "27.96752743", "27.86752743")],
)
def test_a_changed_word_or_digit_is_found_and_written_anew(copy, file, old, new):
    changed = copy / "significance" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new, 1))
    wrong = check_text(copy / "significance" / TEXT, copy).wrong
    assert wrong
    assert all(f"is not as {TEMPLATE} and the rows have it" in sentence for sentence in wrong)
    write_texts(copy)
    assert check_text(copy / "significance" / TEXT, copy).wrong == []


def test_a_line_more_or_less_is_found(copy):
    text = copy / "significance" / TEXT
    text.write_text(text.read_text() + "And more.\n")
    assert check_text(text, copy).wrong == [f"it ends otherwise than {TEMPLATE}"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ significance.mean('ppl', 'lbi') | as('.2f') }}", "has no arm lbi: there are lbl, simbal"),
        ("{{ significance.mean('pppl', 'lbl') | as('.2f') }}", "pppl"),
        ("{{ significance.mean('ppl', 'lbl') }}", r"27.942\d+ needs a format: | as\('.2f'\)"),
        ("{{ significance.median('ppl', 'lbl') }}", "no attribute 'median'"),
        ("{{ significanse.mean('ppl', 'lbl') }}", "'significanse' is undefined"),
        ("{{ (1 / 0) | as('.2f') }}", "division by zero"),
        ("{{ 1 | as('nonsense') }}", "Invalid format specifier"),
        ("\n{{ 1 +", "line 2: unexpected"),
        ("{{ significance._folder.unlink() }}", "'_folder' of 'Study' object is unsafe"),
        ("{{ significance.mean.__globals__ }}", "'__globals__' of 'method' object is unsafe"),
        ("{% set a = significance.arms.clear() %}", "access to attribute 'clear'"),
        ("{% include 'rows.csv' %}", "no loader for this environment"),
    ],
)
def test_a_template_that_is_none_is_a_sentence(copy, template, says):
    with pytest.raises(UserError, match=f"significance/{TEMPLATE}.*{says}"):
        written(copy, template)
    assert "Five seeds of each method" in (copy / "significance" / TEXT).read_text()  # as it was


def test_a_text_that_was_never_written_is_a_sentence(copy):
    (copy / "significance" / TEXT).unlink()
    with pytest.raises(UserError, match="README.md cannot be read: make figures writes it"):
        check_text(copy / "significance" / TEXT, copy)


def test_formulas_are_what_they_say():
    study = Study(RESULTS / "significance")
    ours, theirs = ([study.value("ppl", arm, seed) for seed in range(5)] for arm in ("simbal", "lbl"))
    assert (study.least("ppl", "lbl"), study.most("ppl", "lbl")) == (min(theirs), max(theirs))
    assert study.lower("min_pes", "simbal", "lbl") == 5
    assert study.p_holm("ppl", "simbal", "lbl") == study.p("ppl", "simbal", "lbl")  # of one arm
    assert study.p("ppl", "simbal", "lbl") == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert study.interval("ppl", "simbal", "lbl", "+.2f") == "-1.18 to +2.88"
    assert 2.7 < study.detectable("ppl", "simbal", "lbl") < 2.8
    spread = stdev(one - other for one, other in zip(ours, theirs, strict=True))
    for difference in (0.5, 1.0, 2.0, 5.0):
        assert study.pairs("ppl", "simbal", "lbl", difference) == pairs_to_resolve(spread, difference)
    with pytest.raises(ValueError, match="it has to be above 0"):
        study.pairs("ppl", "simbal", "lbl", 0.0)


def test_studies_agree_as_far_as_the_order_of_their_arms(tmp_path):
    losses = {"one": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0}, "other": {"a": 5.0, "b": 9.0, "c": 6.0, "d": 20.0}}
    for name, arms in losses.items():
        (tmp_path / name).mkdir()
        lines = [f"{arm},{arm},,{seed},run,{loss + seed}" for arm, loss in arms.items() for seed in (0, 1)]
        (tmp_path / name / ROWS).write_text("\n".join(["arm,balancing,setting,seed,run,val/loss", *lines]))
    one, other = (Study(tmp_path / name) for name in losses)
    assert one.agreement("loss", one) == pytest.approx(1)
    assert one.agreement("loss", other) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15): b and c have changed places
    with pytest.raises(ValueError, match="one and significance have not the same arms"):
        one.agreement("loss", Study(RESULTS / "significance"))


def test_a_conclusion_is_one_word():
    study = Study(RESULTS / "significance")
    assert study.conclusion("ppl", "simbal", "lbl") == "not resolved"
    assert study.conclusion("ppl", "simbal", "lbl", 3.0) == "equivalent"
    assert study.conclusion("min_pes", "simbal", "lbl") == "better"
    assert study.conclusion("max_vio", "simbal", "lbl") == "worse"


@given(
    values=st.lists(st.floats(-1, 1), min_size=3, max_size=9).filter(lambda values: max(values) - min(values) > 1e-3),
    margin=st.floats(1e-3, 2),
)
def test_equivalence_is_that_of_the_tables(values, margin):
    paired = Paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    error = stats.sem(values)
    of_tables = equivalence_p(float(sum(values) / len(values)), float(error), len(values) - 1, margin)
    assert paired.equivalence_p(margin) == pytest.approx(of_tables, abs=1e-9)


@given(value=st.floats(1e-12, 1e6), digits=st.integers(0, 4), style=st.sampled_from("fe"))
def test_a_shown_number_is_one_that_is_found_again(value, digits, style):
    assert agrees(shown(value, f".{digits}{style}"), value)
