"""evaluate.py writes tables and files, or a one-sentence error."""

import json
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_method

from simbal.analysis.evaluate import evaluate
from simbal.cli.help import help_page
from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.training.run import train
from tests.composing import refusal
from tests.conftest import CONF, spec_of
from tests.in_process import run

NAMES = sorted(file.stem for file in (CONF / "analysis").glob("*.yaml"))
WITHOUT_A_RUN = ("flops", "orthogonalization")
OF_A_RUN = (
    "quality", "redundancy", "routing", "orthogonality", "dropping", "pruning", "counterfactual", "margin",
    "route_agreement", "coactivation", "ep_load",
)  # fmt: skip
SMALL = {"batch_size": 4, "tokens": 64, "step": 2, "repeats": 2, "resamples": 10, "pairs": 16, "draws": 1}
FEW = ("analysis.orthogonalization.trials=2", "analysis.orthogonalization.steps=2")


def test_several_analyses_print_tables_and_write_numbers(tmp_path):
    done = run(tmp_path, "evaluate.py", f"analysis=[{','.join(WITHOUT_A_RUN)}]", *FEW)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "OrthoInit" in done.stdout
    for name in WITHOUT_A_RUN:
        file = Path("outputs", "analysis", f"{name}.json")
        assert f"written: {file}" in done.stdout
        written = json.loads((tmp_path / file).read_text())
        assert written["analysis"] == name
        assert written["versions"].keys() == {"simbal", "torch"}
    settings = written["settings"]
    assert (settings["trials"], settings["steps"], settings["seed"], settings["d_model"]) == (2, 2, 0, 1536)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_every_number_of_an_analysis_has_a_definition(tmp_path, cache_dir):
    spec = spec_of(tmp_path, cache_dir, "trainer.max_steps=1", "balancing=lbl")
    train(spec)
    settings = {}
    for name in OF_A_RUN:
        keys = yaml.safe_load((CONF / "analysis" / f"{name}.yaml").read_text())[name]
        settings[name] = {key: SMALL.get(key, value) for key, value in keys.items()}
        assert get_method(keys["_target_"]).__name__ == name
    evaluate(settings, str(spec.path), overwrite=False, accelerator="cpu", output_dir="unused")
    measured = collect(spec.path.parent)[0]
    for name in OF_A_RUN:
        numbers = [key for key in measured.analyzed if key.startswith(f"{name}.")]
        assert numbers
        assert [key for key in numbers if not measured.definitions.get(key)] == []


ANALYSIS = """
from simbal.analysis.result import Result

def head(trained, scale: float) -> Result:
    largest = scale * trained.model.head_VD.abs().max().item()
    return Result([], [], {"definition": {"largest_entry": "largest of all"}, "metrics": {"largest_entry": largest}})
"""


def test_a_custom_analysis_is_one_function_and_one_yaml_file(tmp_path, trained, monkeypatch):
    path = trained("balancing=lbl").path
    (tmp_path / "own_analysis.py").write_text(ANALYSIS)
    (tmp_path / "conf" / "analysis").mkdir(parents=True)
    config = "head:\n  _target_: own_analysis.head\n  scale: 2.0\n"
    (tmp_path / "conf" / "analysis" / "head.yaml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    done = run(tmp_path, "evaluate.py", f"run={path}", "analysis=head")
    assert done.returncode == 0, done.stderr
    printed = run(tmp_path, "report.py", str(path.parent), "columns=[largest_entry]", "explain=true")
    assert "head.largest_entry: largest of all" in printed.stdout


def test_runs_that_an_analysis_does_not_apply_to_are_skipped(tmp_path, cache_dir, capsys):
    dense = spec_of(tmp_path, cache_dir, "trainer.max_steps=1", "balancing=none", "model.num_experts=0")
    moe = spec_of(tmp_path, cache_dir, "trainer.max_steps=1", "balancing=lbl", "model.top_k=1")
    for spec in (dense, moe):
        train(spec)

    def evaluated(name, path, **settings):
        settings["_target_"] = f"simbal.analysis.{name}.{name}"
        evaluate({name: settings}, str(path), False, "cpu", "")
        return capsys.readouterr().out

    few = {"tokens": 160, "batch_size": 4}
    printed = evaluated("redundancy", moe.path.parent, **few)
    assert f"skipped: analysis=redundancy needs two experts, but {dense.path} has 0" in printed
    assert [(spec.path / "analysis" / "redundancy.json").exists() for spec in (dense, moe)] == [False, True]
    with pytest.raises(UserError, match="analysis=coactivation applies to none of the 2 runs"):
        evaluated("coactivation", moe.path.parent, **few)
    with pytest.raises(UserError, match=r"analysis=coactivation needs routers, but .* is a dense model"):
        evaluated("coactivation", dense.path, **few)
    (dense.path / "checkpoints/final.ckpt").unlink()
    printed = evaluated("orthogonality", moe.path.parent)
    assert f"skipped: {dense.path}/checkpoints/final.ckpt does not exist" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "quality"),
        (["~analysis"], "analysis=NAME"),
        (["analysis=orthogonalization", "+analysis.orthogonalization.trails=3"], "analysis.orthogonalization.trials?"),
        (["analysis=flops", FEW[0]], "analysis=orthogonalization"),
        (["analysis=orthogonalization", "analysis.orthogonalization.trials=few"], "trials=few"),
        (["analysis=flops", "output_dri=/tmp"], "output_dir?"),
        (["analysis=quality", "run=x", "analysis.quality.tokens=0"], "tokens=0 must be greater than 0"),
        (["analysis=pruning", "run=x", "analysis.pruning.thresholds=[2]"], "analysis.pruning.thresholds[0]=2"),
        (["analysis=flops", "balancing=lbl"], "balancing"),
        (["-m", "analysis=flops"], "-m"),
        (["analysis=flops,orthogonalization"], "analysis=[flops,orthogonalization]"),
    ],
)
def test_an_invalid_argument_is_a_one_sentence_error_with_exit_code_2(arguments, named):
    code, said = refusal("evaluate.py", arguments)
    assert code == 2
    assert named in said
    assert said.startswith("error: ")
    assert "\n" not in said


def test_help_lists_the_analyses_and_no_other_group():
    page = help_page("", "evaluate")
    assert all(name in page for name in NAMES)
    assert "optim:" not in page
