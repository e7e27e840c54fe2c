"""evaluate.py as a user runs it: a table and a file, or one sentence and nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simbal.analysis.evaluate import evaluate
from simbal.cli.help import help_page
from simbal.errors import UserError
from simbal.training.run import train
from tests.composing import refusal
from tests.conftest import spec_of
from tests.in_process import run

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
NAMES = sorted(file.stem for file in (CONF / "analysis").glob("*.yaml"))
WITHOUT_A_RUN = ("flops", "orthogonalization")
FEW = ("analysis.orthogonalization.trials=2", "analysis.orthogonalization.steps=2")


def test_several_analyses_print_their_tables_and_write_their_numbers(tmp_path):
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
        assert written["seconds"] >= 0
    settings = json.loads((tmp_path / "outputs" / "analysis" / "orthogonalization.json").read_text())["settings"]
    assert (settings["trials"], settings["steps"], settings["seed"], settings["d_model"]) == (2, 2, 0, 1536)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_of_several_runs_those_that_an_analysis_is_not_of_are_left_out(tmp_path, cache_dir, capsys):
    of_model = {"dense": ("balancing=none", "model.num_experts=0"), "moe": ("balancing=lbl", "model.top_k=1")}
    specs = {name: spec_of(tmp_path, cache_dir, "trainer.max_steps=1", *keys) for name, keys in of_model.items()}
    for spec in specs.values():
        train(spec)
    few = {"tokens": 160, "batch_size": 4}
    redundancy = {"_target_": "simbal.analysis.redundancy.redundancy", **few}
    evaluate({"redundancy": redundancy}, str(specs["moe"].path.parent), False, "cpu", "")
    assert f"left out: analysis.redundancy compares experts, and {specs['dense'].path} has 0" in capsys.readouterr().out
    done = {name: (spec.path / "analysis" / "redundancy.json").exists() for name, spec in specs.items()}
    assert done == {"dense": False, "moe": True}
    coactivation = {"_target_": "simbal.analysis.coactivation.coactivation", **few}
    with pytest.raises(UserError, match="analysis=coactivation has left out all of the 2 runs"):
        evaluate({"coactivation": coactivation}, str(specs["moe"].path.parent), False, "cpu", "")
    with pytest.raises(UserError, match="is a dense model: analysis=coactivation"):
        evaluate({"coactivation": coactivation}, str(specs["dense"].path), False, "cpu", "")
    (specs["dense"].path / "checkpoints/final.ckpt").unlink()
    orthogonality = {"_target_": "simbal.analysis.orthogonality.orthogonality"}
    evaluate({"orthogonality": orthogonality}, str(specs["moe"].path.parent), False, "cpu", "")
    assert f"left out: {specs['dense'].path}/checkpoints/final.ckpt is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "quality"),
        (["~analysis"], "analysis=NAME"),
        (["analysis=flop"], "flops?"),
        (["analysis=orthogonalization", "trials=3"], "analysis.orthogonalization.trials?"),
        (["analysis=orthogonalization", "+analysis.orthogonalization.trails=3"], "analysis.orthogonalization.trials?"),
        (["analysis=flops", FEW[0]], "analysis=orthogonalization"),
        (["analysis=orthogonalization", "analysis.orthogonalization.trials=few"], "trials=few"),
        (["analysis=flops", "output_dri=/tmp"], "output_dir?"),
        (["analysis=flops", "balancing=lbl"], "balancing"),
        (["analysis=flops", "sweeps=significance"], "sweeps"),
        (["-m", "analysis=flops"], "-m"),
        (["analysis=flops,orthogonalization"], "analysis=[flops,orthogonalization]"),
    ],
)
def test_a_slip_is_one_sentence_and_exit_code_2(arguments, named):
    code, said = refusal("evaluate.py", arguments)
    assert code == 2
    assert named in said
    assert said.startswith("error: ")
    assert "\n" not in said


def test_help_lists_the_analyses_and_no_other_group():
    page = help_page("", "evaluate")
    assert all(name in page for name in NAMES)
    assert "optim:" not in page


@pytest.mark.slow  # a process of its own
def test_looking_around_imports_no_torch():
    program = "import sys, evaluate; print(sorted({'torch', 'lightning', 'rich'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.stdout.strip() == "[]"
