"""Sweeps with faults until the time is over: nothing may be lost, and no result may change.

    python -m tests.chaos.campaign --seconds 600
    python -m tests.chaos.campaign --ray --store

A round is a sweep in a fresh folder, disturbed some times, started again after each disturbance that ended it, and at
last left alone. Its results are compared, bit for bit, with those of a sweep that nothing has disturbed. With `--ray`
half of the sweeps have their jobs on a Ray cluster of three nodes, with `--store` half have their runs in a bucket too.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from tests.chaos.bag import Bag
from tests.chaos.faults import FAULTS
from tests.chaos.round import disturb, finish
from tests.chaos.scene import Scene, Sweep
from tests.chaos.small_disk import SmallDisk, mountable
from tests.chaos.verdict import Verdict, compare, traceback
from tests.store.s3_server import serving
from tests.sweep.ray_cluster import cluster_of

MIN_FAULTS, MAX_FAULTS = 4, 9  # tried in a round
NO_FLOCK_SHARE = 0.3  # of the rounds, on a disk that has no flock
SHARE = 0.5  # of the rounds, on a cluster or with a store where those are asked for
NODES = 3  # of a cluster
LOGGERS = ("none", "tensorboard")  # no result depends on it


class Campaign:
    """Plays rounds, and counts what they have shown."""

    def __init__(self, seed: int, folder: Path, deadline: float, *, ray: bool = False, store: bool = False) -> None:
        """`folder`: for its files; `deadline`: of the monotonic clock, no fault is injected after it.

        `ray`, `store`: whether some of the rounds are with them.
        """
        self.seed, self.folder, self.deadline, self.ray, self.store = seed, folder, deadline, ray, store
        self.mounts = mountable(folder)
        self.bag = Bag(FAULTS, seed)
        self.injected: Counter[str] = Counter()
        self.lost, self.changed, self.other, self.rounds = 0, 0, 0, 0
        self.reference = Scene(folder / "reference", folder / "data")
        self.seconds = 0.0  # that a sweep takes

    def prepare(self) -> None:
        """Run the sweep that all others are compared with."""
        started = time.monotonic()
        sweep = self.reference.start()
        self.reference.await_end([sweep], 600.0)
        self.seconds = time.monotonic() - started
        if sweep.process.returncode:
            raise SystemExit(f"the sweep fails without any fault: {sweep.output.read_text()}")

    def play(self) -> None:
        """One round."""
        self.rounds += 1
        draws, started = random.Random(f"{self.seed}/round {self.rounds}"), time.monotonic()
        folder = self.folder / f"round-{self.rounds}"
        with ExitStack() as stack:
            scene = self._scene(folder, draws, stack)
            disturb(scene, self.bag, draws.randint(MIN_FAULTS, MAX_FAULTS), self.seconds, self.deadline)
            finish(scene, self.seconds)
            verdict = compare(self.reference.outputs, scene.outputs)
            verdict.other += scene.problems
            verdict.other += [said for sweep in scene.sweeps if (said := _raised(sweep))]
            if verdict.lines and scene.disk:
                shutil.copytree(scene.outputs, folder / "kept", symlinks=True)  # before the disk is gone
        self._count(scene, verdict, time.monotonic() - started)
        if not verdict.lines:
            shutil.rmtree(folder)

    def _scene(self, folder: Path, draws: random.Random, stack: ExitStack) -> Scene:
        """What a round is played on."""
        disk = stack.enter_context(SmallDisk(folder / "outputs")) if self.mounts else None
        data = shutil.copytree(self.folder / "data", folder / "data")
        flock, logger = draws.random() > NO_FLOCK_SHARE, draws.choice(LOGGERS)
        server = stack.enter_context(serving()) if self.store and draws.random() < SHARE else None
        scene = Scene(folder, data, f"logger={logger}", disk=disk, server=server, flock=flock)
        if self.ray and draws.random() < SHARE:
            scene.cluster = stack.enter_context(cluster_of(NODES, **scene.added))
        if not flock:
            scene.note("no_flock", "all of this round")
        stack.callback(scene.clear)
        return scene

    def _count(self, scene: Scene, verdict: Verdict, seconds: float) -> None:
        self.injected.update(scene.injected)
        self.lost += len(verdict.lost)
        self.changed += len(verdict.changed)
        self.other += len(verdict.other)
        said = ", ".join(scene.injected) or "nothing"
        where = "".join(f" with a {part}" for part in ("cluster", "store") if part in scene.has)
        print(f"round {self.rounds}{where} ({seconds:.0f} s, {len(scene.sweeps)} sweeps): {said}", flush=True)
        for line in verdict.lines:
            print(f"    {line}")
        if verdict.lines:
            print(f"    kept for inspection: {scene.folder}", flush=True)

    @property
    def good(self) -> bool:
        """Whether nothing has gone wrong."""
        return not (self.lost or self.changed or self.other)

    def summary(self) -> str:
        """The last line."""
        wrong = "" if self.other == 0 else f", {self.other} other things wrong"
        return f"{self.injected.total()} faults injected, {self.lost} runs lost, {self.changed} results changed{wrong}"


def _raised(sweep: Sweep) -> str | None:
    """A traceback of a sweep; Ctrl-C may hit Python before it can say better."""
    return None if signal.SIGINT in sweep.signals else traceback(sweep.output)


def _terminate(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)  # so that disks are unmounted


def main() -> None:
    """Parse the command line, play, print the counts; exit code 1 if anything has gone wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="no fault comes after this; the round is finished")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="at most so many, however short")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all choices")
    parser.add_argument("--ray", action="store_true", help="some of the sweeps on a Ray cluster, which loses its parts")
    parser.add_argument("--store", action="store_true", help="some with a store, whose server and machines are lost")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    folder = Path(tempfile.mkdtemp(prefix="simbal-chaos-"))
    campaign = Campaign(options.seed, folder, deadline, ray=options.ray, store=options.store)
    disk = "a small disk for each round" if campaign.mounts else "no disk can be mounted here: no full_disk"
    print(f"seed {options.seed}, {options.seconds:.0f} seconds and the round in progress; {disk}", flush=True)
    campaign.prepare()
    print(f"a sweep without faults takes {campaign.seconds:.0f} s", flush=True)
    while campaign.rounds < options.rounds and time.monotonic() + campaign.seconds < deadline:
        campaign.play()
    for kind, count in sorted(campaign.injected.items()):
        print(f"{count:6} {kind}")
    if campaign.good:
        shutil.rmtree(folder)
    print(campaign.summary())
    raise SystemExit(not campaign.good)


if __name__ == "__main__":
    main()
