"""One run from its spec to its record: prepare the data, build, train, record.

Everything a user can get wrong is found before the run folder is made.
"""

import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from simbal.data.loader import TokenData
from simbal.data.store import prepare
from simbal.errors import UserError
from simbal.heap import keep_freed_memory
from simbal.run_folder import RunFolder, refusals_of_disk
from simbal.run_spec import RunSpec, result_keys
from simbal.training import checkpoint, record
from simbal.training.build import build_data, build_module, resolve_device, resolve_precision
from simbal.training.lit_moe import LitMoE
from simbal.training.pes import PES
from simbal.training.progress import ProgressBar
from simbal.training.telemetry import Telemetry
from simbal.training.trial_pruning import PrunedError, TrialPruning

log = logging.getLogger("simbal")
EXPECTED_WARNINGS = (
    ".*does not have many workers",  # our loader is a memory map
    ".*exists and is not empty",  # the checkpoints of the run that is continued
    ".*isinstance.treespec, LeafSpec",  # Lightning 2.6 under torch 2.13
)


def train(spec: RunSpec) -> None:
    """Do the run, continue it, or, if it is finished, say so."""
    folder, keys = RunFolder(spec.path), spec.config["trainer"]
    keep_freed_memory()
    store = prepare(spec.config["data"], progress=keys["progress_bar"])
    if folder.finished(spec):
        folder.require_data(store.fingerprints["tokens"])
        print(f"finished before: {folder.path}")
        return
    device = resolve_device(keys["accelerator"])
    precision = resolve_precision(keys["precision"], device, keys["force_precision"])
    module, data = build_module(spec, store, device, precision), build_data(spec, store)
    require_space(folder.path, module)
    with folder.lock(), refusals_of_disk(folder.path):
        if folder.finished(spec):
            print(f"finished by another process: {folder.path}")
            return
        folder.write_spec(spec)
        with log_to(folder.path / "train.log"):
            run = record.describe(spec, data, module, device, precision)
            for line in [*record.lines(run["objective"]), *record.backend_lines(run), *warm_up_note(spec)]:
                print(line)
                log.info(line)
            try:
                metrics = fit(spec, folder.path, module, data, device.type, precision)
            except PrunedError as stop:
                log.info("%s", stop)
                folder.write_record(run | {"status": "pruned", "ended": record.now(), "error": str(stop)})
                print(stop)
                return
            except Exception as error:
                log.exception("the run failed")
                folder.write_record(run | {"status": "failed", "error": f"{type(error).__name__}: {error}"})
                raise
            folder.write_record(run | {"status": "finished", "ended": record.now()} | metrics)
    print(f"val/ppl {metrics['metrics']['val/ppl']:.3f}  {folder.path}")


def warm_up_note(spec: RunSpec) -> list[str]:
    """A sentence if the run is too short for its warm-up: no mistake in a trial run, in a long one it may be."""
    warmup_steps, max_steps = spec.config["optim"]["warmup_steps"], spec.config["trainer"]["max_steps"]
    if warmup_steps < max_steps:
        return []
    return [f"note: trainer.max_steps={max_steps} ends within optim.warmup_steps={warmup_steps}: the rate only rises"]


def fit(
    spec: RunSpec, folder: Path, module: LitMoE, data: TokenData, accelerator: str, precision: str
) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint if there is one; the record's measured part.

    Validated before the first step, after each `val_every`-th and after the last.
    """
    keys = spec.config["trainer"]
    tokens_per_step = keys["global_batch"] * spec.config["data"]["seq_len"]
    pes = PES(keys["pes_every"], keys["pes_tokens"])
    telemetry = Telemetry(folder, keys["log_every"], keys["max_steps"], tokens_per_step, pes)
    trainer = build_trainer(spec, folder, telemetry, accelerator, precision)
    started = time.perf_counter()

    def validate(step: int, path: Path | None = None) -> None:
        trainer.validate(module, data, ckpt_path=path, weights_only=True, verbose=False)
        if not telemetry.validated(step):
            telemetry.log_validation(trainer, module, step)

    path, step = checkpoint.newest(folder / "checkpoints") or (None, 0)
    telemetry.rewind(step)
    if step % keys["val_every"] == 0 and not telemetry.validated(step):
        validate(step, path)  # of the start, or missed by a kill between a step's checkpoint and its validation
    log.info("training from step %d to %d", step, keys["max_steps"])
    trainer.fit(module, data, ckpt_path=path, weights_only=True)
    if module.validation is None or not telemetry.validated(keys["max_steps"]):
        validate(keys["max_steps"])
    trainer.save_checkpoint(folder / "checkpoints" / "final.ckpt", weights_only=True)
    for periodic in (folder / "checkpoints").glob("step-*.ckpt"):
        periodic.unlink()
    assert module.validation is not None
    metrics, layers = module.validation.metrics, module.validation.layers
    if pes.measures(module):
        measured = pes.measure(trainer, module)
        layers = layers | measured.pop("layers")
        metrics = metrics | measured
    if isinstance(trainer.logger, TensorBoardLogger):
        known = {f"final/{key}": value for key, value in metrics.items() if value is not None}
        trainer.logger.log_hyperparams(result_keys(spec.config), known, keys["max_steps"])  # the tab HParams
        trainer.logger.finalize("success")
    return {
        "seconds": time.perf_counter() - started,
        "tokens_per_second": telemetry.tokens_per_second,
        "metrics": metrics,
        "layers": layers,
    }


def build_trainer(spec: RunSpec, folder: Path, telemetry: Telemetry, accelerator: str, precision: str) -> L.Trainer:
    """Lightning's Trainer with nothing of its own on the screen or on the disk."""
    keys = spec.config["trainer"]
    accumulate = keys["global_batch"] // keys["micro_batch"]
    checkpoints = folder / "checkpoints"
    callbacks: list[Callback] = [telemetry, checkpoint.periodic(checkpoints, keys["ckpt_every"])]
    callbacks += [checkpoint.kept(checkpoints, keys["keep_every"]), TrialPruning(folder)]
    if keys["progress_bar"]:
        callbacks.append(ProgressBar(telemetry, f"{spec.choices['balancing']} seed={spec.config['seed']}"))
    tensorboard = spec.config["logger"]["kind"] == "tensorboard"
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    return L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=keys["max_steps"],
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=keys["val_every"] * accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # of `self.log`, which nothing here uses
        use_distributed_sampler=False,
        logger=TensorBoardLogger(folder, "tensorboard", version="") if tensorboard else False,
        callbacks=callbacks,
        plugins=[checkpoint.AtomicCheckpointIO(spec.hash)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def require_space(folder: Path, module: LitMoE) -> None:
    """Refuse to start where two checkpoints (weights and two moments, fp32) do not fit on the disk."""
    needed = 2 * 3 * 4 * sum(parameter.numel() for parameter in module.parameters())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing.resolve()).free
    if free < needed:
        raise UserError(
            f"no space left on the disk of {existing}: the run needs {needed / 1e6:.0f} MB for its checkpoints and "
            f"{free / 1e6:.0f} MB are free; free some space, or set output_dir"
        )


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append what this package logs to `file`."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables every logger that is there when it starts a job, as in a forked process
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
