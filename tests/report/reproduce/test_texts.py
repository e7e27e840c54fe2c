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
from simbal.report.statistics import holm
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
    shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    return tmp_path


def written(copy: Path, template: str) -> str:
    (copy / "collapse" / TEMPLATE).write_text(template)
    assert write_texts(copy) == [copy / "collapse" / TEXT]
    return (copy / "collapse" / TEXT).read_text()


def test_a_text_has_its_numbers_from_the_rows_and_says_which_it_has_not(copy):
    loop = "{% for E in 2, %}\n{{ E }}\n{% endfor %}\n"
    text = written(copy, "Of 5 seeds `at 7`: {{ collapse.mean_sd('loss', 'lbl', '.4f') }}.\n" + loop)
    assert text == "Of 5 seeds `at 7`: 3.5860 ± 0.0650.\n2\n"
    checked = check_text(copy / "collapse" / TEXT, copy)
    assert (checked.verified, checked.unverified, checked.wrong) == (2, ["5", "2"], [])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [(TEXT, "3.5860 ±", "3.5861 ±"), (TEXT, "All four,", "Two,"), ("rows.csv", "3.43792036", "3.53792036")],
)
def test_a_changed_word_or_digit_is_found_and_written_anew(copy, file, old, new):
    changed = copy / "collapse" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new, 1))
    wrong = check_text(copy / "collapse" / TEXT, copy).wrong
    assert wrong
    assert all(f"is not as {TEMPLATE} and the rows have it" in sentence for sentence in wrong)
    write_texts(copy)
    assert check_text(copy / "collapse" / TEXT, copy).wrong == []


def test_a_line_more_or_less_is_found(copy):
    text = copy / "collapse" / TEXT
    text.write_text(text.read_text() + "And more.\n")
    assert check_text(text, copy).wrong == [f"it ends otherwise than {TEMPLATE}"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ collapse.mean('loss', 'lbi') | as('.2f') }}", "has no arm lbi: there are none, frozen, lbl"),
        ("{{ collapse.mean('losss', 'lbl') | as('.2f') }}", "lbl of collapse has no losss"),
        ("{{ collapse.mean('loss', 'lbl') }}", r"3.586\d+ needs a format: | as\('.2f'\)"),
        ("{{ collapse.median('loss', 'lbl') }}", "no attribute 'median'"),
        ("{{ collapze.mean('loss', 'lbl') }}", "'collapze' is undefined"),
        ("{{ (1 / 0) | as('.2f') }}", "division by zero"),
        ("{{ 1 | as('nonsense') }}", "Invalid format specifier"),
        ("\n{{ 1 +", "line 2: unexpected"),
        ("{{ collapse._folder.unlink() }}", "'_folder' of 'Study' object is unsafe"),
        ("{{ collapse.mean.__globals__ }}", "'__globals__' of 'method' object is unsafe"),
        ("{% set a = collapse.arms.clear() %}", "access to attribute 'clear'"),
        ("{% include 'rows.csv' %}", "no loader for this environment"),
    ],
)
def test_a_template_that_is_none_is_a_sentence(copy, template, says):
    with pytest.raises(UserError, match=f"collapse/{TEMPLATE}.*{says}"):
        written(copy, template)
    assert "Does collapse cost anything" in (copy / "collapse" / TEXT).read_text()  # as it was


def test_a_text_that_was_never_written_is_a_sentence(copy):
    (copy / "collapse" / TEXT).unlink()
    with pytest.raises(UserError, match="README.md cannot be read: make figures writes it"):
        check_text(copy / "collapse" / TEXT, copy)


def test_formulas_are_what_they_say():
    study = Study(RESULTS / "collapse")
    ours, theirs = ([study.value("loss", arm, seed) for seed in range(5)] for arm in ("lbl", "none"))
    assert (study.least("loss", "none"), study.most("loss", "none")) == (min(theirs), max(theirs))
    assert study.ranked("loss") == sorted(study.ranked("loss"), key=lambda arm: study.mean("loss", arm))
    assert (study.ranked("loss")[-1], len(study.ranked("loss"))) == ("lbl", 5)
    mixtures = [f"{balancing} num_experts=64" for balancing in ("none", "simbal", "lbl")]
    assert Study(RESULTS / "claims_dense").ranked("seu") == mixtures, "the dense model has none"
    assert study.lower("max_vio", "lbl", "none") == 5
    p = study._paired("loss", "lbl", "none").p
    assert p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert study.p_holm("loss", "lbl", "none") == 4 * p  # the least of four
    assert study.p_holm("loss", "simbal", "none") == 2 * study._paired("loss", "simbal", "none").p
    assert study.p_holm("loss", "frozen", "none") == study.p_holm("loss", "simbal", "none")  # 0.81, 0.48: in order
    assert study.interval("loss", "lbl", "none", "+.2f") == "+0.07 to +0.25"
    assert 0.126 < study.detectable("loss", "lbl", "none") < 0.128
    spread = stdev(one - other for one, other in zip(ours, theirs, strict=True))
    for difference in (0.05, 0.1, 0.2, 0.5):
        assert study.pairs("loss", "lbl", "none", difference) == pairs_to_resolve(spread, difference)
    with pytest.raises(ValueError, match="it has to be above 0"):
        study.pairs("loss", "lbl", "none", 0.0)


def test_a_word_is_corrected_for_what_the_table_compares():
    """There each arm with the one of its own router, and not every arm with one of them."""
    study = Study(RESULTS / "claims_loss_free")
    four = [(f"{arm} router={router}", f"lf router={router}") for arm in ("lf_lbl", "lf_simbal")
            for router in ("sigmoid", "softmax")]  # fmt: skip
    corrected = holm([study._paired("loss", *pair).p for pair in four])
    assert [study.p_holm("loss", *pair) for pair in four] == pytest.approx(corrected)
    assert study.conclusion("loss", "lf_lbl router=softmax", "lf router=softmax") == "better"
    assert study.p_holm("loss", "lf_simbal router=sigmoid", "lf router=softmax") > 0, "which the table compares not"


def test_one_pair_resolves_nothing():
    study = Study(RESULTS / "league_tuning")
    pair = ("loss", "lbl coef=0.1", "lbl coef=0.01")
    assert study.diff(*pair) > 0.1
    assert study.conclusion(*pair) == "not resolved"
    with pytest.raises(ValueError, match="it takes two"):
        study.interval(*pair, "+.2f")


def test_studies_agree_as_far_as_the_order_of_their_arms(tmp_path):
    losses = {"one": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0}, "other": {"a": 5.0, "b": 9.0, "c": 6.0, "d": 20.0}}
    for name, arms in losses.items():
        (tmp_path / name).mkdir()
        lines = [f"{arm},{arm},,{seed},run,{loss + seed}" for arm, loss in arms.items() for seed in (0, 1)]
        (tmp_path / name / ROWS).write_text("\n".join(["arm,balancing,setting,seed,run,val/loss", *lines]))
    one, other = (Study(tmp_path / name) for name in losses)
    assert one.agreement("loss", one) == pytest.approx(1)
    assert one.agreement("loss", other) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15): b and c have changed places
    with pytest.raises(ValueError, match="one and collapse have not the same arms"):
        one.agreement("loss", Study(RESULTS / "collapse"))


def test_a_conclusion_is_one_word():
    study = Study(RESULTS / "collapse")
    assert study.conclusion("loss", "simbal", "none") == "not resolved"
    assert study.conclusion("loss", "simbal", "none", 0.1) == "equivalent"
    assert study.conclusion("max_vio", "simbal", "none") == "better"
    assert study.conclusion("loss", "lbl", "none") == "worse"
    assert study.conclusion("val/unique_experts", "lbl", "none") == "better"
    assert study.conclusion("seu", "lbl", "none") == "higher"


def test_an_arm_without_the_number_is_no_comparison_to_correct_for():
    study = Study(RESULTS / "claims_dense")
    lbl, simbal = "lbl num_experts=64", "simbal num_experts=64"
    ps = sorted(study._paired("min_pes", arm, lbl).p for arm in (simbal, "none num_experts=64"))
    assert study.p_holm("min_pes", "none num_experts=64", lbl) == 2 * ps[0]  # the dense model has no PES
    assert study.p_holm("loss", simbal, lbl) < 3 * study._paired("loss", simbal, lbl).p


def test_the_same_difference_on_every_seed_is_no_test_but_one_to_correct_for():
    paired = Paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert (paired.p, paired.equivalence_p(9.0)) == (1.0, 1.0)
    arm, lbl = "none num_experts=64", "lbl num_experts=64"  # simbal uses all experts on every seed, as lbl does
    study = Study(RESULTS / "claims_dense")
    p = study._paired("unique_experts", arm, lbl).p
    assert study.p_holm("unique_experts", arm, lbl) == pytest.approx(2 * p)


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
