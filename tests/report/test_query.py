"""Runs are chosen by what they are; a query that makes no sense is one sentence."""

import pytest

from simbal.errors import UserError
from simbal.report.query import full_name, is_query, parse

KNOWN = {
    "status", "arm", "seed", "balancing", "val/loss", "val/ppl", "quality.ppl", "data.seed", "optim.lr", "columns",
    "balancing.lbl.coef", "balancing.simbal.coef", "trainer.compile", "when",
}  # fmt: skip
RUN = {
    "status": "finished", "arm": "lbl coef=0.1", "seed": 3, "balancing": "lbl", "val/ppl": 25.0, "quality.ppl": 24.0,
    "data.seed": None, "optim.lr": 0.001, "trainer.compile": False, "columns": ["ppl", "bpb"],
    "when": "2026-11-02T10:00:00+00:00",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("balancing=lbl", True), ("balancing==simbal", False), ("balancing!=simbal", True), ("seed=3", True),
        ("seed=3.0", True), ("seed>=4", False), ("val/ppl<30 and balancing=lbl", True), ("ppl<25", False),
        ("ppl<=25", True), ("lr=1e-3", True), ("arm='lbl coef=0.1'", True), ('arm = "lbl"', False),
        ("data.seed=null", True), ("data.seed!=null", False), ("trainer.compile=false", True), ("compile=true", False),
        ("not seed=3", False), ("not not seed=3", True), ("columns=[ppl,bpb]", True),
        ("seed=1 or seed=3 and status=failed", False), ("(seed=1 or seed=3) and status=finished", True),
        ("not seed=1 and not (status=failed or seed=9)", True), ("when>=2026-11-01", True), ("when<2026-11-01", False),
        ("seed=three", False), ("balancing=3", False), ("seed>2 and seed<4", True),
    ],
)  # fmt: skip
def test_a_query_holds_for_what_it_says(text, holds):
    assert parse(text, KNOWN)(RUN) is holds


@pytest.mark.parametrize("sign", ["=", "!=", "<", "<=", ">", ">="])
def test_what_a_run_has_no_value_for_satisfies_no_comparison(sign):
    assert not parse(f"val/loss{sign}3", KNOWN)(RUN)
    assert not parse(f"data.seed{sign}3", KNOWN)(RUN)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a name is missing"), ("seed", "seed is compared with nothing"), ("seed=", "no value after seed="),
        ("=3", "a name is missing"), ("(seed=3", "a bracket is not closed"), ("seed=3)", "')' is one word too many"),
        ("seed=3 balancing=lbl", "'balancing' is one word too many"), ("seed=3 and", "a name is missing"),
        ("arm='lbl", "\"'lbl\" cannot be read"), ("seed < < 3", "no value after seed<"), ("not", "a name is missing"),
        ("(" * 60 + "seed=3" + ")" * 60, "more than 50 brackets"), ("not " * 10_000 + "seed=3", "more than 50"),
        ("balancig=lbl", "runs have no balancig; did you mean balancing?"), ("pll<3", "did you mean val/ppl"),
        ("coef=1", "coef may be balancing.lbl.coef or balancing.simbal.coef: give the whole name"),
        ("__import__('os')=1", "compared with nothing"), ("zzzzzz=1", "runs have no zzzzzz"),
    ],
)  # fmt: skip
def test_what_is_no_query_is_refused_in_one_sentence(text, said):
    with pytest.raises(UserError) as refused:
        parse(text, KNOWN)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["seed<three", "trainer.compile>1", "columns<1"])
def test_values_without_an_order_are_refused_when_they_are_met(text):
    with pytest.raises(UserError, match="has no order with that"):
        parse(text, KNOWN)(RUN)


def test_a_number_of_the_run_comes_before_one_of_an_analysis():
    assert full_name("ppl", KNOWN) == "val/ppl"
    assert full_name("quality.ppl", KNOWN) == "quality.ppl"


def test_a_text_without_a_comparison_is_no_query():
    assert [is_query(text) for text in ("outputs/default", "a=b", "ppl<3", "not x")] == [False, True, True, False]
