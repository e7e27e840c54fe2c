"""Sweeps with faults until the time is over: nothing may be lost, and no result may change.

    python -m tests.chaos.campaign --seconds 600

A round is a sweep in a fresh folder, disturbed some times, started again after each disturbance that ended it, and at
last left alone. Its results are compared, bit for bit, with those of a sweep that nothing has disturbed.
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

from tests.chaos.faults import FAULTS, FULL_DISK, Bag
from tests.chaos.round import disturb, finish
from tests.chaos.scene import Scene, Sweep
from tests.chaos.small_disk import SmallDisk, mountable
from tests.chaos.verdict import Verdict, compare, traceback

MIN_FAULTS, MAX_FAULTS = 4, 9  # tried in a round
LOGGERS = ("none", "tensorboard")  # no result depends on it


class Campaign:
    """Plays rounds, and counts what they have shown."""

    def __init__(self, seed: int, folder: Path, deadline: float) -> None:
        """`folder`: for its files; `deadline`: of the monotonic clock, no fault is injected after it."""
        self.seed, self.folder, self.deadline = seed, folder, deadline
        self.mounts = mountable(folder)
        self.bag = Bag((*FAULTS, FULL_DISK) if self.mounts else FAULTS, seed)
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
        scene = Scene(folder, data, f"logger={draws.choice(LOGGERS)}", disk=disk)
        stack.callback(scene.clear)
        return scene

    def _count(self, scene: Scene, verdict: Verdict, seconds: float) -> None:
        self.injected.update(scene.injected)
        self.lost += len(verdict.lost)
        self.changed += len(verdict.changed)
        self.other += len(verdict.other)
        said = ", ".join(scene.injected) or "nothing"
        print(f"round {self.rounds} ({seconds:.0f} s, {len(scene.sweeps)} sweeps): {said}", flush=True)
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
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    folder = Path(tempfile.mkdtemp(prefix="simbal-chaos-"))
    campaign = Campaign(options.seed, folder, deadline)
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
