"""Train one run, from its config to its record: prepare the data, build the model, train, validate and record.

User errors are raised before the run folder is created.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from simbal.data.loader import TokenData
from simbal.data.prepare import prepare
from simbal.data.store import Store
from simbal.distributed import is_rank_zero, on_rank_zero
from simbal.processes import tune_memory_allocation
from simbal.runs.atomic import explain_write_errors, remove_partial_files, write_json
from simbal.runs.folder import DOCUMENTS_FILE, RunFolder
from simbal.runs.record import digest, now
from simbal.runs.spec import RunSpec
from simbal.training import build, checkpoint, record, strategies
from simbal.training.callbacks import RunCallbacks, build_callbacks
from simbal.training.failures import record_failures
from simbal.training.module import LitMoE
from simbal.training.validation import is_validated
from simbal.training.warnings import warn_overclipping
from simbal.training.worker import run_on_ranks

log = logging.getLogger("simbal")
EXPECTED_WARNINGS = (
    ".*does not have many workers",  # our loader is a memory map
    ".*exists and is not empty",  # the checkpoint folder of a resumed run
    ".*isinstance.treespec, LeafSpec",  # Lightning 2.6 under torch 2.13
    ".*returned a view tensor",  # FSDP: no layer's output is changed in place
    ".*broadcast_buffers. is deprecated",  # the replacement is not in torch 2.11
    ".*srun. command is available",  # printed wherever Slurm is installed
)


def train(spec: RunSpec) -> None:
    """Train or resume the run; if it has finished, only say so.

    Raises:
        UserError: the run cannot be trained here, or it failed or diverged.
        StoppedError: a signal stopped it after a checkpoint was saved.
        SystemExit: the worker of a run on several devices failed, and printed the error.
    """
    folder, trainer = RunFolder(spec.path), spec.config.trainer
    shape = build.transformer_shape(spec, end_of_text=0)  # reject wrong keys before preparing the data
    if not folder.is_finished(spec):  # a finished run may use a strategy that no longer exists
        build.build_strategies(spec, shape)
    build.resolve_device(trainer.accelerator, strategies.devices_per_node(trainer.devices))
    is_rank = strategies.is_external_rank(trainer.devices)
    store = prepare(spec.config.data, progress=trainer.progress_bar)
    if folder.is_finished(spec):
        finished = folder.read_record() or {}
        folder.require_same_data(finished["data"]["tokens"], store.fingerprints["tokens"])
        print(f"finished before: {folder.path}")
    elif trainer.devices == 1 or is_rank:
        train_rank(spec, store)
    else:
        run_on_ranks(spec)


def train_rank(spec: RunSpec, store: Store) -> None:
    """Train as one rank of the run; rank zero locks the folder, writes and prints."""
    tune_memory_allocation()
    folder, keys = RunFolder(spec.path), spec.config.trainer
    device = build.resolve_device(keys.accelerator, strategies.devices_per_node(keys.devices))
    precision = build.resolve_precision(keys.precision, device, keys.force_precision)
    callbacks = build_callbacks(spec)
    trainer = build_trainer(spec, callbacks, device.type, precision)
    strategies.join_ranks(trainer.strategy)
    module, data = build.build_module(spec, store, device, precision), build.build_data(spec, store)
    run: dict[str, Any] = {}
    measured: dict[str, Any] = {}  # stays empty if the run is pruned
    with ExitStack() as stack:
        if not on_rank_zero(partial(acquire_folder, folder, spec, stack)):
            return
        if is_rank_zero():
            stack.enter_context(explain_write_errors(folder.path))
            stack.enter_context(log_to(folder.path / "train.log"))
            run = record.describe_run(spec, data, module, device, precision)
            record.print_header(spec, run)
        damaged_record = folder.set_aside_damaged_record() if is_rank_zero() else None
        with record_failures(folder, run):
            measured = fit(spec, trainer, callbacks, module, data)
            notices = [] if damaged_record is None else [damaged_record]
            notices += [*measured["warnings"], *checkpoint.damage_warnings(folder.path / "checkpoints")]
            if is_rank_zero():
                end = {"status": "finished", "ended": now(), "warnings": notices}
                folder.write_record(run | measured | end)
        if measured and is_rank_zero():
            checkpoint.remove_periodic(folder.path / "checkpoints")
            for warning in measured["warnings"]:
                print(f"warning: {warning}")
            print(f"val/ppl {measured['metrics']['val/ppl']:.3f}  {folder.path}")


def acquire_folder(folder: RunFolder, spec: RunSpec, stack: ExitStack) -> bool:
    """Lock the run folder until `stack` is closed, and clean up after a killed process.

    Returns:
        False if another process has already finished the run.

    Raises:
        UserError: another process or another run uses the folder.
    """
    stack.enter_context(folder.lock())
    if folder.is_finished(spec):
        print(f"finished by another process: {folder.path}")
        return False
    folder.write_spec(spec)
    with explain_write_errors(folder.path):
        for written in (folder.path, folder.path / "checkpoints"):
            remove_partial_files(written)
    return True


def build_trainer(spec: RunSpec, callbacks: RunCallbacks, accelerator: str, precision: str) -> L.Trainer:
    """Return a Trainer without Lightning's own progress bar, loggers, default checkpoints and signal handlers."""
    keys = spec.config.trainer
    accumulate = keys.global_batch // (keys.micro_batch * keys.devices)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    trainer = L.Trainer(
        accelerator=accelerator,
        **strategies.trainer_arguments(keys.devices, keys.strategy, spec.hash),
        precision=precision,  # type: ignore[arg-type]
        max_steps=keys.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=keys.val_every * accumulate,  # replaced by ValidationSchedule
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # of `self.log`, which is not used
        use_distributed_sampler=False,
        logger=False,  # Tracker sends the rows
        callbacks=[*callbacks],
        plugins=[checkpoint.AtomicCheckpointIO(spec.hash), strategies.cluster_environment()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=spec.path,
    )
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]  # see StopRequest
    return trainer


def fit(spec: RunSpec, trainer: L.Trainer, callbacks: RunCallbacks, module: LitMoE, data: TokenData) -> dict[str, Any]:
    """Train to the last step on every rank, with validations in between and one on the whole validation split.

    Returns:
        The entries of the record that are measured during training: `seconds`, `tokens_per_second`, `metrics`,
        `layers`, `curves`, `documents`, `skipped_steps` and `warnings`.

    Raises:
        DivergedError, PrunedError, StoppedError: training ended early.
        UserError: a checkpoint belongs to another config.
    """
    folder, keys, metrics = spec.path, spec.config.trainer, callbacks.metrics

    def validate_once(step: int, path: Path | None = None) -> None:
        if not metrics.has_validation(step):
            trainer.validate(module, data, ckpt_path=path, weights_only=True, verbose=False)
            metrics.log_validation(module, step)

    with callbacks.checkpoints.request.listen():
        start = on_rank_zero(lambda: checkpoint.find_newest(folder / "checkpoints", spec.hash, metrics.find_damage))
        callbacks.checkpoints.start = start.step
        metrics.rewind(start.curves)
        callbacks.tracker.open(start.step)
        if is_validated(start.step, keys.val_every, keys.val_at):
            validate_once(start.step, start.path)  # at step 0, or if the run was killed before this validation
        log.info("training from step %d to %d", start.step, keys.max_steps)
        if start.step and is_rank_zero():
            print(f"resuming from step {start.step} of {keys.max_steps}")
        trainer.fit(module, data, ckpt_path=start.path, weights_only=True)
        validate_once(keys.max_steps)
        trainer.save_checkpoint(folder / "checkpoints" / checkpoint.FINAL, weights_only=True)
        trainer.validate(module, data.validation_batches(None), verbose=False)
        measured = metrics.final_metrics(trainer, module)
    callbacks.tracker.finish(measured["metrics"])
    clip_factors = [row["train/clipped"] for row in metrics.rows() if "train/clipped" in row]
    return measured | {
        "seconds": callbacks.checkpoints.total_seconds,
        "documents": write_documents(folder, module),
        "curves": metrics.state_dict(),
        "skipped_steps": module.skipped_steps,
        "warnings": [
            *callbacks.rounding.warnings,
            *callbacks.devices.warnings,
            *warn_overclipping(clip_factors, spec.config.optim),
            *callbacks.tracker.warnings,
        ],
    }


def write_documents(folder: Path, module: LitMoE) -> dict[str, Any] | None:
    """Write documents.json, the sums of the last validation by document; return its size and sha256 on rank zero."""
    if not is_rank_zero():
        return None
    assert module.validation is not None
    nats, tokens, num_bytes = module.validation.documents_G3.T.tolist()
    sums = {"nats": nats, "tokens": [*map(int, tokens)], "bytes": [*map(int, num_bytes)]}
    write_json(folder / DOCUMENTS_FILE, sums)
    return digest((folder / DOCUMENTS_FILE).read_bytes())


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append the log messages of this package to `file` within the block."""
    handler = logging.FileHandler(file)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk loses lines, not the run
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables all existing loggers when it starts a job
    try:
        yield
    finally:
        log.removeHandler(handler)
        with suppress(OSError):
            handler.close()
