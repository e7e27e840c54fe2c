"""Sweeps with random faults: no run may be lost, and no result may change.

    python -m tests.chaos.campaign --seconds 600

Each round injects faults into a sweep in a new folder and restarts the sweep after each fault that ends it. Then the
sweep finishes without faults, and its results are compared bit for bit with an uninterrupted sweep.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom
from typing import NoReturn

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.scene import Scene
from tests.chaos.verdict import compare, find_traceback

LOGGERS = ("none", "tensorboard")  # no result depends on it
STARTUP_SECONDS = 4.0  # of a sweep before its first job
MAX_DELAY = 0.15  # between the first job and a fault, as a fraction of a sweep's duration
FINISH_SECONDS = 60.0  # for a sweep to end, in addition to ten times its usual duration


class Campaign:
    """Plays rounds and counts problems."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.deadline = time.monotonic() + options.seconds  # no fault is injected after it
        self.order = Random(options.seed)
        self.bag: list[Fault] = []  # the next faults
        self.injected: Counter[str] = Counter()
        self.lost = self.changed = self.other = self.rounds = 0
        self.reference = Scene(folder / "reference", folder / "data", *options.overrides)
        self.sweep_seconds = 0.0  # duration of an undisturbed sweep

    def run_reference(self) -> None:
        """Run the undisturbed sweep."""
        started = time.monotonic()
        sweep = self.reference.start()
        self.reference.wait_for_end([sweep], 600.0)
        self.sweep_seconds = time.monotonic() - started
        if sweep.process.returncode:
            raise SystemExit(f"the sweep fails without any fault: {sweep.output.read_text()}")

    def play_round(self) -> None:
        """Play one round and judge it."""
        self.rounds += 1
        started, random = time.monotonic(), Random(f"{self.options.seed}/{self.rounds}")
        folder = self.folder / f"round-{self.rounds}"
        data = shutil.copytree(self.folder / "data", folder / "data")
        scene = Scene(folder, data, f"logger={random.choice(LOGGERS)}", *self.options.overrides)
        try:
            self.disturb(scene, random)
            self.finish(scene)
            verdict = compare(self.reference.outputs, scene.outputs)
        finally:
            scene.kill_all()
        # Ctrl-C may interrupt Python before simbal handles it
        tracebacks = [find_traceback(sweep.output) for sweep in scene.sweeps if signal.SIGINT not in sweep.signals]
        verdict.other += [*scene.problems, *(line for line in tracebacks if line)]
        self.injected.update(scene.injected)
        self.lost += len(verdict.lost)
        self.changed += len(verdict.changed)
        self.other += len(verdict.other)
        faults = ", ".join(scene.injected) or "no fault"
        seconds = time.monotonic() - started
        print(f"round {self.rounds} ({seconds:.0f} s, {len(scene.sweeps)} sweeps): {faults}", flush=True)
        for line in verdict.lines:
            print(f"    {line}; see {folder}", flush=True)
        if not verdict.lines:
            shutil.rmtree(folder)

    def disturb(self, scene: Scene, random: Random) -> None:
        """Inject faults until there are enough, the sweep is complete or the time is up."""
        for _ in range(self.options.faults or random.randint(4, 9)):
            fault = self.draw_fault()
            if not scene.running() and not scene.is_complete:
                scene.start()
            if random.random() < 0.25:
                scene.wait(random.uniform(0.0, STARTUP_SECONDS))
            else:
                scene.wait(2 * self.sweep_seconds, lambda: bool(scene.jobs()))
                scene.wait(random.uniform(0.0, MAX_DELAY * self.sweep_seconds))
            if time.monotonic() > self.deadline or (scene.is_complete and not fault.after_end):
                return
            before = len(scene.injected)
            fault.inject(fault.kind, scene, random)
            if fault.kind not in scene.injected[before:]:
                self.bag.append(fault)  # it was impossible: try it later

    def draw_fault(self) -> Fault:
        """Return the next fault; each kind comes as often as its weight says."""
        if not self.bag:
            self.bag = [fault for fault in FAULTS for _ in range(fault.weight)]
            self.order.shuffle(self.bag)
        return self.bag.pop(0)

    def finish(self, scene: Scene) -> None:
        """Let the sweep end, then run the command again, which has to finish all remaining runs."""
        limit = FINISH_SECONDS + 10 * self.sweep_seconds
        scene.wait_for_end(scene.running(), limit)
        sweep = scene.start()
        scene.wait_for_end([sweep], limit)
        if sweep.process.returncode:
            scene.report(f"{sweep.output.name}, which was not disturbed, ended with {sweep.process.returncode}")
        scene.require_no_orphans()


def exit_on_signal(number: int, _: object) -> NoReturn:
    """Kill processes on the way out."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run a campaign; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="no fault after this; the round is finished")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="maximum number of rounds")
    parser.add_argument("--faults", type=int, default=0, help="faults per round; 0: four to nine")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6), help="of all random choices")
    parser.add_argument("overrides", nargs="*", help="overrides of the sweep")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, exit_on_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    folder = Path(tempfile.mkdtemp(prefix="simbal-chaos-"))
    campaign = Campaign(options, folder)
    print(f"seed {options.seed}, {options.seconds:.0f} seconds and the current round", flush=True)
    campaign.run_reference()
    print(f"a sweep without faults takes {campaign.sweep_seconds:.0f} s", flush=True)
    while campaign.rounds < options.rounds and time.monotonic() + campaign.sweep_seconds < campaign.deadline:
        campaign.play_round()
    for kind, count in sorted(campaign.injected.items()):
        print(f"{count:6} {kind}")
    failed = bool(campaign.lost or campaign.changed or campaign.other)
    if not failed:
        shutil.rmtree(folder)
    wrong = f", {campaign.other} other problems" if campaign.other else ""
    faults = campaign.injected.total()
    print(f"{faults} faults injected, {campaign.lost} runs lost, {campaign.changed} results changed{wrong}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
