"""An exported run is measured as a model of Hugging Face, with the numbers of the run."""

import json
import shlex
from pathlib import Path

import pytest

from simbal.hf.export import export
from simbal.report.report import read_table
from simbal.training.run import train
from tests.analysis.text_run import text_spec
from tests.in_process import run

SAME = {  # the numbers that are no times, of which rounding alone can change the last digits
    "quality": ("loss", "loss_se", "ppl", "bpb", "bpb_se"),
    "redundancy": ("min_pes", "mean_pes", "min_pes_se"),
    "routing": ("seu", "max_vio", "entropy", "entropy_load", "unique_experts", "dead_experts", "mutual_information"),
    "orthogonality": ("gram_deviation", "norm_mean", "max_cosine"),
    "dropping": ("ppl_drop_0", "ppl_drop_1", "ppl_drop_2"),
    "pruning": ("ppl_prune_plain", "ppl_prune_0.2", "experts_prune_0.2"),
    "counterfactual": ("loss", "random_loss"),  # the others are small differences of these
    "margin": ("margin_q0.25", "margin_q0.5"),
    "coactivation": ("largest", "companion"),
    "ep_load": ("overload_2", "overload_max_2", "overload_total_2"),
}


@pytest.mark.slow
def test_a_run_and_its_export_have_the_same_numbers(tmp_path):
    spec = text_spec(tmp_path, "balancing=simbal", "model.init_std=0.2")
    train(spec)
    export(str(spec.path), str(tmp_path / "exported"), overwrite=False)
    sweep, data = spec.path.parent, spec.config.data
    text = [f"data.{key}={getattr(data, key)}" for key in ("txt_split", "validation_one_in", "cache_dir")]
    analyses = f"analysis=[{','.join(SAME)}]"
    of_run = run(tmp_path, "evaluate.py", f"run={spec.path}", analyses, f"data.cache_dir={data.cache_dir}")
    asked = [f"hf={tmp_path / 'exported'}", f"name={sweep.name}", f"output_dir={sweep.parent}", analyses]
    of_export = run(tmp_path, "evaluate.py", *asked, "data=files", f"data.files={tmp_path / 'corpus.txt'}", *text)
    for done in (of_run, of_export):
        assert done.returncode == 0, f"{shlex.join(done.args)}\n{done.stdout}\n{done.stderr}"
    for name, numbers in SAME.items():
        ours, theirs = (metrics(folder, name) for folder in (spec.path, sweep / "exported"))
        for number in numbers:
            assert theirs[number] == pytest.approx(ours[number], rel=2e-5, abs=1e-7), (name, number)
    table = read_table(sweep, columns=["quality.bpb", "redundancy.min_pes", "routing.seu"])
    assert [model.name for model in table.models] == ["exported"]
    assert len(table.rows) == 1
    shown = run(tmp_path, "report.py", str(sweep), "columns=[quality.bpb,redundancy.min_pes,routing.seu]")
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    of_arms = {
        words[0]: words[-3:] for words in lines if words and words[0] in ("simbal", "exported") and len(words) > 4
    }
    assert of_arms["simbal"] == of_arms["exported"]  # as the table rounds them


def metrics(folder: Path, analysis: str) -> dict:
    return json.loads((folder / "analysis" / f"{analysis}.json").read_text())["metrics"]
