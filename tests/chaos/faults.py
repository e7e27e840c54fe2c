"""The faults of a campaign: each does its harm to a scene, and notes it there if it came about."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from simbal.data.verification import MEMORY
from tests.chaos.cluster_faults import kill_ray_worker, lose_head, lose_node
from tests.chaos.damage import flip, tear, truncate
from tests.chaos.scene import END_SECONDS, Scene
from tests.chaos.store_faults import fail_store, lose_machine

# a program that holds a run's folder, unless another one does
HOLD = """
import sys, time
from pathlib import Path
from simbal.errors import exit_on_user_error
from simbal.runs.folder import RunFolder
with exit_on_user_error(), RunFolder(Path(sys.argv[1])).lock():
    time.sleep(float(sys.argv[2]))
"""
Damage = Callable[[Path, Random], str]


@dataclass(frozen=True)
class Fault:
    """`weight`: how often it is drawn; `after_end`: whether it makes sense when the sweep is complete.

    `needs`: of what a scene has.
    """

    kind: str
    weight: int
    inject: Callable[[str, Scene, Random], None]
    after_end: bool = False
    needs: str = "outputs"


def kill_job(number: signal.Signals) -> Callable[[str, Scene, Random], None]:
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


def kill_fork_server(kind: str, scene: Scene, draws: Random) -> None:
    """As the kernel may do when memory runs out; its jobs live on without it."""
    if servers := scene.fork_servers():
        with suppress(ProcessLookupError):
            os.kill(servers[0], signal.SIGKILL)
            scene.note(kind, f"process {servers[0]}")


def kill_sweep(number: signal.Signals) -> Callable[[str, Scene, Random], None]:
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


def damage_checkpoint(damage: Damage) -> Callable[[str, Scene, Random], None]:
    """Damage the newest checkpoint of a run, an older one, or all of them; at rest or while jobs run."""

    def inject(kind: str, scene: Scene, draws: Random) -> None:
        if draws.random() < 0.6:
            scene.rest()
        folders = sorted({file.parent for file in scene.outputs.glob("default/*/checkpoints/step-*.ckpt")})
        if not folders:
            return
        files = sorted(draws.choice(folders).glob("step-*.ckpt"))
        which = draws.random()
        chosen = files[-1:] if which < 0.6 else files[:1] if which < 0.75 else files
        _damage_all(kind, scene, draws, damage, chosen)

    return inject


def damage_record(damage: Damage) -> Callable[[str, Scene, Random], None]:
    """Damage how a run ended, of a finished one or of one that was killed; at rest or while jobs run."""

    def inject(kind: str, scene: Scene, draws: Random) -> None:
        if draws.random() < 0.5:
            scene.rest()
        files = sorted(scene.outputs.glob("default/*/record.json"))
        _damage_all(kind, scene, draws, damage, [draws.choice(files)] if files else [])

    return inject


def damage_curves(kind: str, scene: Scene, draws: Random) -> None:
    """Damage metrics.jsonl of a run, at rest: it is verified when the run goes on, or by its record."""
    scene.rest()
    files = sorted(scene.outputs.glob("default/*/metrics.jsonl"))
    damage = draws.choice((truncate, flip, flip, tear))
    _damage_all(kind, scene, draws, damage, [draws.choice(files)] if files else [])


def full_disk(kind: str, scene: Scene, draws: Random) -> None:
    """Leave no room on the disk, or a little, for some seconds."""
    if scene.disk is None or not scene.running():
        return
    left, seconds = draws.choice((0, 0, 4096, 65_536)), draws.uniform(0.5, 6.0)
    with scene.disk.filled(left):
        scene.note(kind, f"{left} bytes left for {seconds:.1f} s")
        scene.wait(seconds)
    scene.say("the disk has room again")


def limit_files(kind: str, scene: Scene, draws: Random) -> None:
    """Forbid every process of the sweep, for some seconds, to write beyond so many bytes into a file."""
    limit, seconds = draws.choice((0, 3000, 30_000)), draws.uniform(0.5, 6.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not scene.running():
        return
    try:
        _limit(scene, (limit, before[1]))
        scene.note(kind, f"{limit} bytes for {seconds:.1f} s")
        scene.wait(seconds)
    finally:
        _limit(scene, before)
    scene.say("files may grow again")


def second_sweep(kind: str, scene: Scene, draws: Random) -> None:
    """Give the same command while it runs."""
    if len(scene.running()) == 1:
        sweep = scene.start()
        scene.note(kind, sweep.output.stem)


def damage_data(kind: str, scene: Scene, draws: Random) -> None:
    """Damage a file of the prepared data: no sweep may believe them; then do what its sentence says."""
    scene.rest()
    files = sorted(file for file in scene.data.rglob("[!.]*") if file.is_file() and file.name != MEMORY)
    if not files:
        return
    file = draws.choice(files)
    damage = draws.choice((flip, flip, truncate))
    _damage_all(kind, scene, draws, damage, [file])
    sweep = scene.start()
    scene.await_end([sweep], END_SECONDS)
    said = sweep.output.read_text()
    if sweep.process.returncode != 1 or "delete" not in said or scene.jobs():
        scene.complain(f"{file.name} is damaged, but {sweep.output.stem} ended with {sweep.process.returncode}: {said}")
    shutil.rmtree(next(place for place in scene.data.iterdir() if file.is_relative_to(place)))


def busy_folder(kind: str, scene: Scene, draws: Random) -> None:
    """Hold the folder of a run for some seconds, as another program that writes it."""
    if not scene.running() or not (runs := scene.runs()):
        return
    run, seconds = draws.choice(runs), draws.uniform(0.2, 4.0)
    command = [sys.executable, "-c", HOLD, str(scene.outputs / "default" / run), str(seconds)]
    held = subprocess.run(command, env=scene.environment, capture_output=True, text=True, check=False)
    if held.returncode == 0:
        scene.note(kind, f"{run} for {seconds:.1f} s")


FAULTS = (
    Fault("kill_job SIGKILL", 4, kill_job(signal.SIGKILL)),
    Fault("kill_job SIGTERM", 4, kill_job(signal.SIGTERM)),
    Fault("kill_fork_server", 1, kill_fork_server, needs="fork server"),
    Fault("kill_sweep SIGKILL", 2, kill_sweep(signal.SIGKILL)),
    Fault("kill_sweep SIGTERM", 2, kill_sweep(signal.SIGTERM)),
    Fault("kill_sweep SIGINT", 2, kill_sweep(signal.SIGINT)),
    Fault("truncate_checkpoint", 2, damage_checkpoint(truncate)),
    Fault("flip_checkpoint", 3, damage_checkpoint(flip)),
    Fault("truncate_record", 1, damage_record(truncate), after_end=True),
    Fault("flip_record", 2, damage_record(flip), after_end=True),
    Fault("damage_curves", 3, damage_curves, after_end=True),
    Fault("full_disk", 2, full_disk, needs="disk"),
    Fault("limit_files", 1, limit_files),
    Fault("second_sweep", 2, second_sweep),
    Fault("damage_data", 2, damage_data),
    Fault("busy_folder", 3, busy_folder),
    Fault("lose_node", 4, lose_node, needs="cluster"),
    Fault("kill_ray_worker", 3, kill_ray_worker, needs="cluster"),
    Fault("lose_head", 2, lose_head, needs="cluster"),
    Fault("fail_store", 6, fail_store, needs="store"),
    Fault("lose_machine", 4, lose_machine, after_end=True, needs="store"),
)


def _damage_all(kind: str, scene: Scene, draws: Random, damage: Damage, files: list[Path]) -> None:
    """One fault, however many files; those that a job has removed meanwhile do not count."""
    done = []
    for file in files:
        with suppress(FileNotFoundError):
            done.append(damage(file, draws))
    if done:
        scene.note(kind, ", ".join(done))


def _limit(scene: Scene, limits: tuple[int, int]) -> None:
    """Twice, as a process may be forked from one that is not limited yet."""
    for _ in range(2):
        for pid in scene.processes():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
