"""The page of a sweep while its jobs run: how far each is, the curves so far and what has failed.

It is cheap enough to be written every few seconds: files are read from where the last look at them ended, and the
curves are drawn by the browser alone.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import orjson
from markupsafe import Markup

from simbal.errors import UserError
from simbal.files.console import clock
from simbal.files.disk import write_text
from simbal.report.arms import group, label_columns
from simbal.report.collect import Run
from simbal.report.page import series
from simbal.report.page.chart import Chart, curves_json, thinned
from simbal.report.page.series import MOST_SEEDS, Bins, Curve, History, ShownArm
from simbal.report.page.styles import MOST_ARMS, styles
from simbal.report.page.template import render
from simbal.report.sections import folder_link
from simbal.report.table import LastSweep
from simbal.runs.folder import CONSOLE_FILE, CURVES_FILE, RECORD_FILE, RunFolder
from simbal.runs.progress import PROGRESS_FILE, read_progress
from simbal.runs.record import error_of
from simbal.runs.spec import RunSpec

State = Literal["running", "failed", "queued", "pruned", "done"]
STATES: tuple[State, ...] = ("running", "failed", "queued", "pruned", "done")  # in the order in which they are shown
SHOWN = {  # what is kept of a validation, by figure: its title and the unit
    "val/loss": ("loss", "Validation loss", "nats per token"),
    "val/unique_experts": ("experts", "Experts in use", "experts"),
    "val/max_vio": ("max-vio", "Load imbalance", "MaxVio"),
    "val/mean_pes": ("pes", "Mean expert similarity (PES)", "PES"),
}
FOLLOWED = re.compile(rb'<span id="live" data-every="(?P<every>[0-9.]+)" data-written="(?P<written>[0-9.]+)">')
MOST_JOBS = 100  # in the table
LOOKS = 64  # at the next runs that wait, and as many in turn at all that have no result: folders cost time
LARGEST_PAGE = 1 << 26  # bytes
LATE_SECONDS, LATE = 120.0, 5  # a page that is older, also by so many times its usual age, is written no more
MOST_NUMBERS = 18_000  # of all curves
LONGEST_READ = 1 << 24  # bytes of curves at a look
TAIL = 1 << 12  # bytes of a log
SCRIPTS = ("uplot/uPlot.iife.min.js", "curves.js", "live.js")


@dataclass(frozen=True)
class Job:
    """A run as the page shows it."""

    label: str
    state: State
    step: int
    max_steps: int
    progress: Mapping[str, Any]
    error: str
    folder: str  # a link; empty before there is a folder
    loss: float | None  # of the newest validation


class Follower:
    """Follows one run: it reads what its files have got since the last look."""

    def __init__(self, label: str, spec: RunSpec) -> None:
        self.label, self.spec, self.drawn = label, spec, False
        self.run = Run(spec.path, spec, None, {})
        self.max_steps = int(spec.config.trainer.max_steps)
        self.folder = RunFolder(spec.path)
        self.state: State = "queued"
        self.loss: float | None = None
        self._record_stamp: tuple[int, int] | None = None
        self._record: dict[str, Any] | None = None
        self.read, self.step = 0, 0
        self.forget()
        self.job = Job(label, "queued", 0, self.max_steps, {}, "", "", None)

    def forget(self) -> None:
        """Forget the curves."""
        self.rows: list[dict[str, Any]] = []
        self.bins = Bins(self.max_steps)

    @property
    def history(self) -> History:
        """The curves so far."""
        return History(self.run, self.rows, self.bins.points())

    def look(self, started: float) -> None:
        """Find out how far the run is, which `job` then says; `started`: when the sweep was, by the clock of its files.

        A run that is not drawn is followed while it runs.
        """
        self.state, error = self._state(started)
        if self.drawn or self.state == "running":
            self._read_curves()
        else:
            self.forget()
        progress = read_progress(self.spec.path) if self.state == "running" else {}
        step = self.max_steps if self.state == "done" else max(self.step, int(progress.get("step", 0)))
        link = folder_link(self.run) if self.spec.path.is_dir() else ""
        self.job = Job(self.label, self.state, step, self.max_steps, progress, error, link, self.loss)

    def _state(self, started: float) -> tuple[State, str]:
        record = self._read_record()
        if record is not None and record["config_hash"] == self.spec.hash:
            status = str(record["status"])
            if status in ("finished", "pruned"):
                return ("done" if status == "finished" else "pruned"), ""
            retried = status == "killed" or self.spec.config.retry_failed
            if not retried or self._is_newer(RECORD_FILE, started):
                return "failed", f"{status}: {error_of(record)}. Last line: {self._last_line()}"
        begun = any(self._is_newer(name, started) for name in (PROGRESS_FILE, CONSOLE_FILE))
        return ("running" if begun else "queued"), ""

    def _is_newer(self, name: str, started: float) -> bool:
        with suppress(OSError):
            return (self.spec.path / name).stat().st_mtime >= started
        return False

    def _read_record(self) -> dict[str, Any] | None:
        """Return the record, which is read again only when it is another one."""
        try:
            found = (self.spec.path / RECORD_FILE).stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if stamp != self._record_stamp:
                self._record, self._record_stamp = self.folder.whole_record(), stamp
        except (OSError, UserError):
            self._record = self._record_stamp = None
        return self._record

    def _last_line(self) -> str:
        for name in (CONSOLE_FILE, "train.log"):
            with suppress(OSError), (self.spec.path / name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                if lines := file.read(TAIL).decode(errors="replace").split("\n"):
                    said = [line.strip() for line in lines if line.strip()]
                    if said:
                        return said[-1]
        return "there is none"

    def _read_curves(self) -> None:
        """Read whole new lines; a file that is shorter than before has been rewound, and is read from its start."""
        file = self.spec.path / CURVES_FILE
        try:
            size = file.stat().st_size
            if size == self.read or not file.is_file():
                return
            if size < self.read:
                self.read, self.step = 0, 0
                self.forget()
            with file.open("rb") as opened:
                opened.seek(self.read)
                new = opened.read(LONGEST_READ)
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, UserError, KeyError, TypeError):  # a broken line is the report's to complain of
                self._keep(orjson.loads(line))

    def _keep(self, row: dict[str, Any]) -> None:
        place = {key: int(series.number(row[key], self.run)) for key in ("step", "tokens")}
        self.bins.add(row | place, self.run)
        numbers = {key: series.number(row[key], self.run) for key in SHOWN if key in row}
        if numbers:
            self.rows.append(place | numbers)
        self.loss = numbers.get("val/loss", self.loss)
        self.step = place["step"]


def is_followed(file: Path) -> bool:
    """Whether a page is that of a sweep that goes on writing it."""
    try:
        found = FOLLOWED.search(file.read_bytes())
    except (OSError, ValueError):
        return False
    return found is not None and time.time() - float(found["written"]) < max(LATE_SECONDS, LATE * float(found["every"]))


class LivePage:
    """The page of the runs of one folder, outputs/<name>; it is written from the first job on."""

    def __init__(self, folder: Path, runs: Sequence[tuple[str, RunSpec]]) -> None:
        """Begin to follow the runs, each with its label."""
        self.folder, self.written = folder, False
        self.followers = [Follower(label, spec) for label, spec in runs]
        arms = group([follower.run for follower in self.followers], label_columns([spec for _, spec in runs]))
        arms.sort(key=lambda arm: not arm.answers_to(runs[0][1].config.baseline))  # as the table has them
        self.left_out = max(0, len(arms) - MOST_ARMS)
        self.first_seeds = MOST_SEEDS if any(len(arm.runs) > MOST_SEEDS for arm in arms) else 0
        by_path = {follower.spec.path: follower for follower in self.followers}
        self.drawn = {arm.name: [by_path[run.path] for run in arm.runs[:MOST_SEEDS]] for arm in arms[:MOST_ARMS]}
        for follower in chain.from_iterable(self.drawn.values()):
            follower.drawn = True
        self.command = LastSweep.of(folder).command
        self.started = (folder / "sweep.json").stat().st_mtime
        self.begun_with: int | None = None  # steps that were done at the first look
        self.turn = 0

    def write(self, every: float, stopped: bool = False) -> None:
        """Write index.html as things are; nothing before a job has started, as an older page may be there.

        Args:
            every: seconds until the page is written again.
            stopped: the sweep was stopped, and the page is not written again.

        Raises:
            UserError: the disk refuses.
        """
        for follower in self._due():
            follower.look(self.started)
        jobs = [follower.job for follower in self.followers]
        steps = sum(job.step for job in jobs)
        self.begun_with = steps if self.begun_with is None else self.begun_with
        if not self.written and not any(job.state == "running" for job in jobs):
            return
        write_text(self.folder / "index.html", self._html(jobs, every, stopped))
        self.written = True

    def _due(self) -> list[Follower]:
        """Return whom to look at: at first all, then those that run, the next that wait, and in turn the others.

        Jobs may start in any order, and a failed one again. A finished run stays so.
        """
        if self.begun_with is None:
            return self.followers
        by_state: dict[State, list[Follower]] = {state: [] for state in STATES}
        for follower in self.followers:
            by_state[follower.state].append(follower)
        others = by_state["queued"][LOOKS:] + by_state["failed"]
        self.turn = self.turn + LOOKS if self.turn + LOOKS < len(others) else 0
        return by_state["running"] + by_state["queued"][:LOOKS] + others[self.turn : self.turn + LOOKS]

    def _html(self, jobs: Sequence[Job], every: float, stopped: bool) -> str:
        charts = self._charts()
        counts = Counter(job.state for job in jobs)
        total = sum(job.max_steps for job in jobs)
        return render(
            "live.html",
            SCRIPTS,
            name=self.folder.resolve().name,
            command=self.command,
            jobs=sorted(jobs, key=lambda job: STATES.index(job.state))[:MOST_JOBS],
            more_jobs=max(0, len(jobs) - MOST_JOBS),
            counts=[(state, counts[state]) for state in STATES if counts[state] or state in ("running", "done")],
            steps=sum(job.step for job in jobs),
            total=total,
            seconds_left=None if stopped else self._seconds_left(jobs),
            charts=charts,
            curves=Markup(curves_json(thinned([(name, chart) for name, _, chart in charts], MOST_NUMBERS))),
            left_out=self.left_out,
            first_seeds=self.first_seeds,
            written=time.time(),
            every=every,
            stopped=stopped,
            clock=clock,
        )

    def _seconds_left(self, jobs: Sequence[Job]) -> float | None:
        """Return the seconds to the end, if the rest goes as fast as what was done since the first look."""
        open_jobs = [job for job in jobs if job.state in ("running", "queued")]
        left = sum(job.max_steps - job.step for job in open_jobs)
        done = sum(job.step for job in jobs) - (self.begun_with or 0)
        seconds = time.time() - self.started
        return left * seconds / done if done > 0 and seconds > 0 else None

    def _arms(self, states: Container[State]) -> list[ShownArm]:
        """Return the arms that are drawn, with the curves of the runs that are in one of these states."""
        names = [*self.drawn]
        histories = [tuple(each.history for each in of_arm if each.state in states) for of_arm in self.drawn.values()]
        return [ShownArm(*each) for each in zip(names, styles(names), histories, strict=True)]

    def _charts(self) -> list[tuple[str, str, Chart]]:
        """Return name, title and chart of each figure that has points.

        An arm's line is the mean over its finished runs, or of all of them while none is finished.
        """
        every, done = self._arms(STATES), self._arms(("done",))
        chosen = [finished if finished.histories else begun for finished, begun in zip(done, every, strict=True)]
        found = [
            (name, title, unit, _with_seeds(*(series.over_tokens(arms, key) for arms in (chosen, every))))
            for key, (name, title, unit) in SHOWN.items()
        ]
        trained = _with_seeds(series.training_loss(chosen), series.training_loss(every))
        found.insert(1, ("training-loss", "Training loss", "nats per token", trained))
        return [
            (name, title, Chart([("", curves)], "training tokens", unit))
            for name, title, unit, curves in found
            if curves
        ]


def _with_seeds(curves: Sequence[Curve], every: Sequence[Curve]) -> list[Curve]:
    """Return the curves with the points of all seeds."""
    seeds = {curve.name: curve.seeds for curve in every}
    return [replace(curve, seeds=seeds[curve.name]) for curve in curves]
