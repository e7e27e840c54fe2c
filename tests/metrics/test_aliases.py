"""Files of older versions, and what a user types by an older name, are read under today's names."""

import json

import pytest

from simbal.analysis.shared.finding import read_analysis, write_analysis
from simbal.metrics.aliases import ALIASES, renamed, short_names
from simbal.metrics.table import SIMILARITY, TRAINING, VALIDATION
from simbal.report.collect import collect
from simbal.report.columns import choose
from simbal.runs.curves import readable_rows, rows
from simbal.runs.folder import RunFolder

KEYS = {metric.key for metric in (*VALIDATION, *SIMILARITY, *TRAINING)}


def test_every_alias_of_a_run_leads_to_a_metric_and_none_is_a_name_of_today():
    assert {new for new in ALIASES.values() if "." not in new} <= KEYS
    assert not ALIASES.keys() & KEYS
    assert not ALIASES.keys() & set(ALIASES.values())


def test_a_number_under_both_names_is_that_of_today():
    assert renamed({"val/seu": 1, "routing/seu": 2}) == renamed({"routing/seu": 2, "val/seu": 1}) == {"val/seu": 1}


def test_an_old_record_and_its_curves_are_read_under_todays_names(write_run):
    path = write_run(
        metrics={"val/ppl": 9.0, "load/max_vio": 0.5, "pes/min": 0.1},
        definitions={"val/ppl": "p", "load/max_vio": "m"},
        layers={"load/tokens_per_expert": [[1, 2]], "pes": [0.1]},
    )
    record = RunFolder(path).read_record()
    assert record["metrics"] == {"val/ppl": 9.0, "val/max_vio": 0.5, "val/min_pes": 0.1}
    assert record["definitions"] == {"val/ppl": "p", "val/max_vio": "m"}
    assert record["layers"] == {"val/tokens_per_expert": [[1, 2]], "val/pes": [0.1]}
    old = {"step": 1, "tokens": 10, "train/load/max_vio": 0.5, "pes/min": 0.1, "layers": {"pes": [0.1]}}
    new = {"step": 1, "tokens": 10, "train/max_vio": 0.5, "val/min_pes": 0.1, "layers": {"val/pes": [0.1]}}
    (path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    assert rows(path) == readable_rows(path) == [new]


def test_the_layers_of_a_diverged_run_stay_a_list(write_run):
    path = write_run(status="diverged", error="the loss is nan", step=3, layers=[{"router/weight_norm": 1.0}])
    assert RunFolder(path).read_record()["layers"] == [{"router/weight_norm": 1.0}]


def test_an_old_analysis_is_read_under_todays_names(tmp_path):
    numbers = {"entropy_topk": 1.0, "entropy_full": 2.0}
    file = tmp_path / "routing.json"
    write_analysis(file, {"settings": {}, "definition": {"entropy_topk": "e"}, "metrics": numbers, "layers": numbers})
    found = read_analysis(file)
    assert found["metrics"] == found["layers"] == {"entropy": 1.0, "entropy_full": 2.0}
    assert found["definition"] == {"entropy": "e"}


@pytest.mark.parametrize("typed", ["pes/min", "val/min_pes", "min_pes", "min"])
def test_a_column_is_chosen_by_either_name_or_the_last_part_of_one(write_run, typed):
    folder = write_run(metrics={"val/min_pes": 0.1}).parent
    assert [metric.key for metric in choose([typed], collect(folder))] == ["val/min_pes"]


def test_a_short_name_is_the_runs_own_number_only_if_a_run_has_it(write_run):
    path = write_run(metrics={"val/ppl": 1.0})
    write_analysis(path / "analysis/redundancy.json", {"settings": {}, "definition": {}, "metrics": {"min_pes": 0.1}})
    assert [metric.key for metric in choose(["min_pes"], collect(path.parent))] == ["redundancy.min_pes"]
    assert short_names("routing.entropy") == {"routing.entropy", "entropy", "routing.entropy_topk", "entropy_topk"}
