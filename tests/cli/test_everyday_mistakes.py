"""An everyday mistake gives an exit code and a one-sentence error with the key and an alternative."""

import shlex

import pytest

from tests.composing import refusal

FILES = {"mine.csv": "a", "mine.txt": "a text"}
USAGE, REFUSED = 2, 1  # exit codes: the command line or a config is wrong; the run cannot start

# program, arguments, exit code, the key in the message, the alternative that it offers
MISTAKES = [
    # unknown keys
    ("train.py", "sed=1", USAGE, "sed", "seed"),
    ("train.py", "lr=1e-3", USAGE, "lr", "optim.lr"),
    ("train.py", "model.topk=2", USAGE, "model.topk", "model.top_k"),
    ("train.py", "trainer.epochs=3", USAGE, "trainer.epochs", "trainer.max_steps"),
    ("train.py", "balancing.simbal.coeff=0.1", USAGE, "balancing.simbal.coeff", "balancing.simbal.coef"),
    ("train.py", "balancing=lbl balancing.simbal.coef=0.1", USAGE, "balancing.simbal.coef", "balancing=simbal"),
    ("train.py", "resume=outputs/default/RUN", USAGE, "resume", "run"),
    ("train.py", "data.path=mine.txt", USAGE, "data.path", "data.files"),
    ("train.py", "+trainer.max_step=1", USAGE, "trainer.max_step", "trainer.max_steps"),
    ("train.py", "-m ++optim.lrx=1", USAGE, "optim.lrx", "optim.lr"),
    # unknown options
    ("train.py", "balancing=simball", USAGE, "balancing", "simbal"),
    ("train.py", "model=moe", USAGE, "model", "moe_l"),
    ("train.py", "data=web", USAGE, "data", "files"),
    ("train.py", "logger=tb", USAGE, "logger", "tensorboard"),
    ("train.py", "-m sweeps=coeficient", USAGE, "sweeps", "coefficient"),
    ("train.py", "-m hydra/launcher=slurmm seed=0-1", USAGE, "hydra/launcher", "slurm"),
    # wrong types and bounds
    ("train.py", "seed=a", USAGE, "seed", ""),
    ("train.py", "optim.lr=fast", USAGE, "optim.lr", ""),
    ("train.py", "optim.lr=-1", USAGE, "optim.lr", "0"),
    ("train.py", "trainer.max_steps=0", USAGE, "trainer.max_steps", "1"),
    ("train.py", "trainer.max_steps=1e4", USAGE, "trainer.max_steps", "trainer.max_steps=10000"),
    ("train.py", "trainer.precision=bf16", USAGE, "trainer.precision", "bf16-mixed"),
    ("train.py", "trainer.accelerator=gpu", USAGE, "trainer.accelerator", "cuda"),
    ("train.py", "dry_run=yes", USAGE, "dry_run", "true"),
    ("train.py", "model.num_layers=100000", USAGE, "model.num_layers", "1024"),
    ("train.py", "trainer.devices=100000", USAGE, "trainer.devices", "1024"),
    ("train.py", "columns=[pepl] -m seed=0-1", REFUSED, "pepl", "val/ppl"),
    ("train.py", "name=../x", USAGE, "name", ""),
    # values that contradict each other
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
    ("train.py", "-m balancing=lbl,lf balancing.lf.center=no", USAGE, "balancing.lf.center", "true"),
    ("train.py", "-m seed=range(0,1000000000000)", USAGE, "seed=range(0,1000000000000)", "10000"),
    ("train.py", "-m balancing=simbal,lbl baseline=lbk", REFUSED, "baseline", "lbl"),
    ("train.py", "-m seed=0-1 trainer.max_steps=10,20", REFUSED, "trainer.max_steps", "name="),
    ("train.py", "-m seed=0-1 hydra.launcher.jobs=2", USAGE, "jobs", "n_jobs"),
    # missing runs, and other programs
    ("train.py", "run=outputs/default/RUN", USAGE, "run", ""),
    ("train.py", "from=outputs/default/RUN", USAGE, "from", ""),
    ("report.py", "nowhere", REFUSED, "nowhere", ""),
    ("report.py", ". colums=[ppl]", REFUSED, "colums", "columns"),
    ("evaluate.py", "analysis=qualty run=outputs/default", USAGE, "analysis", "quality"),
    ("evaluate.py", "analysis=quality run=outputs/default", REFUSED, "outputs/default", ""),
    ("export.py", "run=outputs/default/RUN", REFUSED, "to=", ""),
    # Hydra's grammar, flags and interpolation
    ("train.py", "--seed 1", USAGE, "--seed", "seed="),
    ("train.py", "--learning-rate=1", USAGE, "--learning-rate", "optim.lr"),
    ("train.py", "lbl", USAGE, "lbl", "balancing=lbl"),
    ("train.py", "-m balancing=simbal, lbl", USAGE, "balancing=simbal,", "without spaces"),
    ("train.py", "-m balancing=[simbal,lbl", USAGE, "balancing=[simbal,lbl", "seed=1,2"),
    ("train.py", "balancing=[simbal,lbll]", USAGE, "balancing=lbll", "lbl"),
    ("train.py", "balancing=lbl+simbal", USAGE, "balancing", "-m balancing=lbl,simbal"),
    ("train.py", "data=mine.txt", USAGE, "data=mine.txt", "data.files=mine.txt"),
    ("train.py", "optim=null", USAGE, "optim", ""),
    ("train.py", "~optim.lr", USAGE, "optim.lr", ""),
    ("train.py", "+model.top_k=2", USAGE, "model.top_k", "leave out the +"),
    ("train.py", "'optim.lr=${optim.x}'", USAGE, "optim.x", ""),
    ("train.py", "'output_dir=${oc.env:NOT_THERE}'", USAGE, "NOT_THERE", ""),
    ("train.py", "'optim.betas=[0,2]'", USAGE, "optim.betas[1]", "less than 1"),
    ("train.py", "data=files", USAGE, "data.files", "data.files=VALUE"),
    ("train.py", "data.files=x", USAGE, "data.files", "data=files"),
    ("train.py", "name=2026", USAGE, "name=2026", "quote"),
    ("train.py", "+balancing.mine._target_=os.system", REFUSED, "os.system", ""),
    ("train.py", "-m seed=0-1 --cfg job", USAGE, "--cfg", ""),
    ("train.py", "sweeps=significance", USAGE, "sweeps=significance", "-m"),
]


@pytest.mark.parametrize(
    ("program", "arguments", "code", "named", "offered"), MISTAKES, ids=[" ".join(case[:2]) for case in MISTAKES]
)
def test_mistake_is_a_one_sentence_error_with_the_key_and_an_alternative(program, arguments, code, named, offered):
    ended, message = refusal(program, shlex.split(arguments), FILES)
    assert ended == code, message
    assert message.startswith("error: ")
    assert "\n" not in message
    assert named in message
    assert offered in message.removeprefix(f"error: {arguments}")
