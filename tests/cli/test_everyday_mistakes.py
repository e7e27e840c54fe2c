"""An everyday mistake ends with an exit code and a sentence that names the key and, if there is one, what was meant."""

import shlex

import pytest

from simbal.cli import main as dispatcher
from tests.composing import refusal

FILES = {"mine.csv": "a", "mine.txt": "a text"}
USAGE, REFUSED = 2, 1  # exit codes: the command line or the config is wrong, or the run cannot be done

# program, arguments, exit code, what the sentence names, the alternative that it offers
MISTAKES = [
    # keys that there are not
    ("train.py", "sed=1", USAGE, "sed", "seed"),
    ("train.py", "lr=1e-3", USAGE, "lr", "optim.lr"),
    ("train.py", "model.topk=2", USAGE, "model.topk", "model.top_k"),
    ("train.py", "trainer.epochs=3", USAGE, "trainer.epochs", "trainer.max_steps"),
    ("train.py", "balancing.simbal.coeff=0.1", USAGE, "balancing.simbal.coeff", "balancing.simbal.coef"),
    ("train.py", "balancing=lbl balancing.simbal.coef=0.1", USAGE, "balancing.simbal.coef", "balancing=simbal"),
    ("train.py", "resume=outputs/default/RUN", USAGE, "resume", "run"),
    ("train.py", "data.path=mine.txt", USAGE, "data.path", "data.files"),
    ("train.py", "+trainer.max_step=1", USAGE, "trainer.max_step", "trainer.max_steps"),
    # options that a group has not
    ("train.py", "balancing=simball", USAGE, "balancing", "simbal"),
    ("train.py", "model=moe", USAGE, "model", "moe_l"),
    ("train.py", "router=soft", USAGE, "router", "softmax"),
    ("train.py", "experts=triton", USAGE, "experts", "torch"),
    ("train.py", "data=web", USAGE, "data", "files"),
    ("train.py", "optim=adam", USAGE, "optim", "adamw"),
    ("train.py", "trainer=long", USAGE, "trainer", "default"),
    ("train.py", "logger=tb", USAGE, "logger", "tensorboard"),
    ("train.py", "-m sweeps=coeficient", USAGE, "sweeps", "coefficient"),
    ("train.py", "-m hydra/launcher=slurmm seed=0-1", USAGE, "hydra/launcher", "slurm"),
    # values of another type, or out of bounds
    ("train.py", "seed=a", USAGE, "seed", ""),
    ("train.py", "optim.lr=fast", USAGE, "optim.lr", ""),
    ("train.py", "optim.lr=-1", USAGE, "optim.lr", "0"),
    ("train.py", "trainer.max_steps=0", USAGE, "trainer.max_steps", "1"),
    ("train.py", "trainer.max_steps=1e4", USAGE, "trainer.max_steps", "trainer.max_steps=10000"),
    ("train.py", "trainer.precision=bf16", USAGE, "trainer.precision", "bf16-mixed"),
    ("train.py", "trainer.accelerator=gpu", USAGE, "trainer.accelerator", "cuda"),
    ("train.py", "dry_run=yes", USAGE, "dry_run", "true"),
    ("train.py", "columns=[pepl] -m seed=0-1", REFUSED, "pepl", "val/ppl"),
    ("train.py", "name=../x", USAGE, "name", ""),
    # values that do not go together
    ("train.py", "model.top_k=32", USAGE, "model.top_k", "16"),
    ("train.py", "model.d_model=100", USAGE, "model.d_model", "model.num_heads"),
    ("train.py", "trainer.micro_batch=3", USAGE, "trainer.micro_batch", "trainer.global_batch"),
    ("train.py", "data=synthetic balancing=[lf,quantile]", REFUSED, "quantile", ""),
    ("train.py", "balancing=lbl model.num_experts=0", USAGE, "balancing=lbl", "balancing=none"),
    ("train.py", "data=synthetic experts=megablocks", REFUSED, "megablocks", ""),
    # data
    ("train.py", "data=files data.files=nowhere.txt", REFUSED, "data.files", ""),
    ("train.py", "data=files data.files=mine.csv", REFUSED, "mine.csv", ".txt"),
    ("prepare.py", "data.vocab_size=100", USAGE, "data.vocab_size", "257"),
    # spans and sweeps
    ("train.py", "seed=0-4", USAGE, "seed", "-m"),
    ("train.py", "-m balancing=simbal,lbl balancing.lbl.coeff=0.1", USAGE, "balancing.lbl.coeff", "balancing.lbl.coef"),
    ("train.py", "-m seed=4-0", USAGE, "seed", "0-4"),
    ("train.py", "balancing=simbal,lbl", USAGE, "balancing", "-m"),
    ("train.py", "-m balancing=simbal,lbl baseline=lbk", REFUSED, "baseline", "lbl"),
    ("train.py", "-m seed=0-1 trainer.max_steps=10,20", REFUSED, "trainer.max_steps", "name="),
    ("train.py", "-m seed=0-1 hydra.launcher.jobs=2", USAGE, "jobs", "n_jobs"),
    # runs that are not there, and the other programs
    ("train.py", "run=outputs/default/RUN", USAGE, "run", ""),
    ("train.py", "from=outputs/default/RUN", USAGE, "from", ""),
    ("report.py", "nowhere", REFUSED, "nowhere", ""),
    ("report.py", ". colums=[ppl]", REFUSED, "colums", "columns"),
    ("evaluate.py", "analysis=qualty run=outputs/default", USAGE, "analysis", "quality"),
    ("evaluate.py", "analysis=quality run=outputs/default", REFUSED, "outputs/default", ""),
    ("export.py", "run=outputs/default/RUN", REFUSED, "to", ""),
]


@pytest.mark.parametrize(
    ("program", "arguments", "code", "named", "offered"), MISTAKES, ids=[" ".join(case[:2]) for case in MISTAKES]
)
def test_it_names_the_key_and_offers_what_was_meant(program, arguments, code, named, offered):
    ended, said = refusal(program, shlex.split(arguments), FILES)
    assert ended == code, said
    assert said.startswith("error: ")
    assert "\n" not in said
    assert named in said
    assert offered in said.replace(arguments, "")


def test_a_command_that_there_is_not_is_answered_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simbal", "trian", "seed=1"])
    with pytest.raises(SystemExit) as end:
        dispatcher.main()
    said = capsys.readouterr().err
    assert end.value.code == USAGE
    assert said.startswith("error: ")
    assert "trian" in said
    assert "did you mean train?" in said
