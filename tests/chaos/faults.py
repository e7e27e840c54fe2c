"""The faults of a campaign: each does its harm to a scene, and notes it there if it came about."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.scene import END_SECONDS, Scene

Damage = Callable[[Path, Random], str]
Inject = Callable[[str, Scene, Random], None]


@dataclass(frozen=True)
class Fault:
    """`weight`: how often it is drawn; `after_end`: whether it makes sense when the sweep is complete."""

    kind: str
    weight: int
    inject: Inject
    after_end: bool = False


class Bag:
    """Draws faults in an order that a seed decides, each kind as often as its weight says."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults, self.seed = faults, seed
        self.drawn = 0
        self.left: list[Fault] = []
        self._order = Random(seed)

    def draw(self) -> tuple[Fault, Random]:
        """The next fault, and the choices that it is to make."""
        if not self.left:
            self.left = [fault for fault in self.faults for _ in range(fault.weight)]
            self._order.shuffle(self.left)
        self.drawn += 1
        return self.left.pop(0), Random(f"{self.seed}/fault {self.drawn}")

    def put_back(self, fault: Fault) -> None:
        """Draw a fault that could not come about again, after the others."""
        self.left.append(fault)


def truncate(file: Path, draws: Random) -> str:
    """Cut off at least one byte, at most all."""
    size = file.stat().st_size
    kept = draws.randrange(size) if size else 0
    with file.open("r+b") as opened:
        opened.truncate(kept)
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} cut from {size} to {kept} bytes"


def flip(file: Path, draws: Random) -> str:
    """Turn over one bit."""
    size = file.stat().st_size
    if size == 0:
        raise FileNotFoundError(f"{file} is empty")
    at, bit = draws.randrange(size), draws.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} bit {bit} of byte {at} of {size} flipped"


def kill_job(number: signal.Signals) -> Inject:
    """Send a signal to one job."""

    def inject(kind: str, scene: Scene, draws: Random) -> None:
        jobs = scene.jobs()
        if not jobs:
            return
        pid = draws.choice(sorted(jobs))
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            scene.note(kind, f"process {pid}, {jobs[pid]}")

    return inject


def kill_sweep(number: signal.Signals) -> Inject:
    """Send a signal to one sweep, and wait for its end; its jobs may still be at it when the next begins."""

    def inject(kind: str, scene: Scene, draws: Random) -> None:
        running = scene.running()
        if not running:
            return
        sweep = draws.choice(running)
        sweep.signals.append(number)
        sweep.process.send_signal(number)
        scene.note(kind, sweep.output.stem)
        scene.await_end([sweep], END_SECONDS)

    return inject


def flip_checkpoint(kind: str, scene: Scene, draws: Random) -> None:
    """Damage the newest checkpoint of a run, an older one, or all of them; at rest or while jobs run."""
    if draws.random() < 0.6:
        scene.rest()
    folders = sorted({file.parent for file in scene.outputs.glob("default/*/checkpoints/step-*.ckpt")})
    if not folders:
        return
    files = sorted(draws.choice(folders).glob("step-*.ckpt"))
    which = draws.random()
    chosen = files[-1:] if which < 0.6 else files[:1] if which < 0.75 else files
    _damage_all(kind, scene, draws, flip, chosen)


def truncate_record(kind: str, scene: Scene, draws: Random) -> None:
    """Damage how a run ended, of a finished one or of one that was killed; at rest or while jobs run."""
    if draws.random() < 0.5:
        scene.rest()
    files = sorted(scene.outputs.glob("default/*/record.json"))
    _damage_all(kind, scene, draws, truncate, [draws.choice(files)] if files else [])


def full_disk(kind: str, scene: Scene, draws: Random) -> None:
    """Leave no room on the disk, or a little, for some seconds."""
    if scene.disk is None or not scene.running():
        return
    left, seconds = draws.choice((0, 0, 4096, 65_536)), draws.uniform(0.5, 6.0)
    with scene.disk.filled(left):
        scene.note(kind, f"{left} bytes left for {seconds:.1f} s")
        scene.wait(seconds)
    scene.say("the disk has room again")


def second_sweep(kind: str, scene: Scene, draws: Random) -> None:
    """Give the same command while it runs."""
    if len(scene.running()) == 1:
        sweep = scene.start()
        scene.note(kind, sweep.output.stem)


def _damage_all(kind: str, scene: Scene, draws: Random, damage: Damage, files: list[Path]) -> None:
    """One fault, however many files; those that a job has removed meanwhile do not count."""
    done = []
    for file in files:
        with suppress(FileNotFoundError):
            done.append(damage(file, draws))
    if done:
        scene.note(kind, ", ".join(done))


FULL_DISK = Fault("full_disk", 2, full_disk)  # where a small disk can be mounted
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
