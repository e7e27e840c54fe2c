"""Faults of a campaign: signals, damaged files and a second sweep."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.scene import END_SECONDS, Scene

Inject = Callable[[str, Scene, Random], None]  # counts the fault in the scene if it could be injected


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    kind: str
    weight: int  # relative frequency
    inject: Inject
    after_end: bool = False  # whether it makes sense once the sweep is complete


def truncate(file: Path, random: Random) -> str:
    """Cut off at least one byte."""
    size = file.stat().st_size
    kept = random.randrange(size) if size else 0
    os.truncate(file, kept)
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} cut from {size} to {kept} bytes"


def flip_bit(file: Path, random: Random) -> str:
    """Flip one bit in place."""
    size = file.stat().st_size
    if size == 0:
        raise FileNotFoundError(f"{file} is empty")
    at, bit = random.randrange(size), random.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} bit {bit} of byte {at} of {size} flipped"


def kill_job(number: signal.Signals) -> Inject:
    """Send a signal to one job."""

    def inject(kind: str, scene: Scene, random: Random) -> None:
        if jobs := scene.jobs():
            pid = random.choice(jobs)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                scene.count_fault(kind, f"process {pid}")

    return inject


def kill_sweep(number: signal.Signals) -> Inject:
    """Send a signal to one sweep and wait for its end; its jobs may still run when the next sweep starts."""

    def inject(kind: str, scene: Scene, random: Random) -> None:
        if running := scene.running():
            sweep = random.choice(running)
            sweep.signals.append(number)
            sweep.process.send_signal(number)
            scene.count_fault(kind, sweep.output.stem)
            scene.wait_for_end([sweep], END_SECONDS)

    return inject


def flip_checkpoint(kind: str, scene: Scene, random: Random) -> None:
    """Damage the newest checkpoint of a run, an older one, or all of them; at rest or while jobs run."""
    if random.random() < 0.6:
        scene.stop_all()
    folders = sorted({file.parent for file in scene.outputs.glob("default/*/checkpoints/step-*.ckpt")})
    if folders:
        files = sorted(random.choice(folders).glob("step-*.ckpt"))
        which = random.random()
        chosen = files[-1:] if which < 0.6 else files[:1] if which < 0.75 else files
        damage_files(kind, scene, random, flip_bit, chosen)


def truncate_record(kind: str, scene: Scene, random: Random) -> None:
    """Damage the record of a run; at rest or while jobs run."""
    if random.random() < 0.5:
        scene.stop_all()
    if files := sorted(scene.outputs.glob("default/*/record.json")):
        damage_files(kind, scene, random, truncate, [random.choice(files)])


def damage_files(
    kind: str, scene: Scene, random: Random, damage: Callable[[Path, Random], str], files: list[Path]
) -> None:
    """Damage files as one fault; files that a job has removed in the meantime do not count."""
    done = []
    for file in files:
        with suppress(FileNotFoundError):
            done.append(damage(file, random))
    if done:
        scene.count_fault(kind, ", ".join(done))


def second_sweep(kind: str, scene: Scene, random: Random) -> None:
    """Run the same command while it runs."""
    if len(scene.running()) == 1:
        scene.count_fault(kind, scene.start().output.stem)


FAULTS = (
    Fault("kill_job SIGKILL", 4, kill_job(signal.SIGKILL)),
    Fault("kill_job SIGTERM", 4, kill_job(signal.SIGTERM)),
    Fault("kill_sweep SIGKILL", 2, kill_sweep(signal.SIGKILL)),
    Fault("kill_sweep SIGTERM", 2, kill_sweep(signal.SIGTERM)),
    Fault("kill_sweep SIGINT", 2, kill_sweep(signal.SIGINT)),
    Fault("flip_checkpoint", 3, flip_checkpoint),
    Fault("truncate_record", 2, truncate_record, after_end=True),
    Fault("second_sweep", 2, second_sweep),
)
