"""A folder, the sweeps that work in it, what they print and the processes that they start."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from simbal.processes import THREADS
from tests.chaos.small_disk import SmallDisk
from tests.child_processes import alive, holder
from tests.sweep.small_sweep import command

MARK = "SIMBAL_CHAOS"  # environment variable that children inherit: orphans are found by it too
POLL_SECONDS = 0.05
END_SECONDS = 40.0  # for processes that were told to end, or whose sweep is gone; they take 5 and what a busy core adds
KEYS = ("trainer.max_steps=120", "trainer.micro_batch=4", "retry_failed=true")


@dataclass
class Sweep:
    """One command, and where its output goes; `signals`: what was sent to it."""

    process: "subprocess.Popen[bytes]"
    output: Path
    reader: threading.Thread
    signals: list[signal.Signals] = field(default_factory=list)


class Scene:
    """The sweeps of one folder, one after another or two at once; `injected` and `problems` grow as things happen."""

    def __init__(self, folder: Path, cache_dir: Path, *keys: str, disk: SmallDisk | None = None) -> None:
        """`cache_dir`: of the data; `keys`: overrides of the sweep beside KEYS; `disk`: where the outputs are."""
        self.folder, self.outputs, self.disk = folder, folder / "outputs", disk
        self.environment = {key: value for key, value in os.environ.items() if key not in THREADS}
        self.environment[MARK] = str(folder)
        self.command = command(self.outputs, cache_dir, *KEYS, *keys)
        self.sweeps: list[Sweep] = []
        self.injected: list[str] = []  # the kind of each fault
        self.problems: list[str] = []  # beside what a comparison of the results would show
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """A line of events.txt."""
        with (self.folder / "events.txt").open("a") as file:
            file.write(f"{time.monotonic() - self._began:7.2f} {text}\n")

    def note(self, kind: str, detail: str) -> None:
        """Count a fault that has come about."""
        self.injected.append(kind)
        self.say(f"{kind}: {detail}")

    def complain(self, problem: str) -> None:
        """Remember something that must not happen."""
        self.problems.append(problem)
        self.say(f"PROBLEM: {problem}")

    def start(self) -> Sweep:
        """The sweep's command, once more."""
        output = self.folder / f"sweep-{len(self.sweeps) + 1}.txt"
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
        )
        reader = threading.Thread(target=_copy, args=(process, output), daemon=True)
        reader.start()
        self.sweeps.append(Sweep(process, output, reader))
        self.say(f"{output.stem} started as process {process.pid}")
        return self.sweeps[-1]

    def running(self) -> list[Sweep]:
        """Those that have not ended."""
        return [sweep for sweep in self.sweeps if sweep.process.poll() is None]

    @property
    def complete(self) -> bool:
        """Whether the last sweep has done everything."""
        return bool(self.sweeps) and not self.running() and self.sweeps[-1].process.returncode == 0

    def processes(self) -> list[int]:
        """All that sweeps of this folder have started and that live, they themselves included."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            if ours and alive(int(entry.name)):
                found.append(int(entry.name))
        return sorted(found)

    def jobs(self) -> dict[int, str]:
        """The processes that do a run, each the leader of a session, and the folder that each has locked."""
        sweeps = {sweep.process.pid for sweep in self.sweeps}
        runs = {holder(file): file.parent.name for file in (self.outputs / "default").glob("*/.lock")}
        found = {}
        for pid in self.processes():
            if pid not in sweeps and _session(pid) == pid:
                found[pid] = runs.get(pid, "no run yet")
        return found

    def wait(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait until `condition`, no longer than `seconds` and no longer than a sweep runs; what it then is."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline and not condition():
            time.sleep(POLL_SECONDS)
        return condition()

    def await_end(self, sweeps: list[Sweep], seconds: float) -> None:
        """Wait until they have ended; a problem if they do not."""
        deadline = time.monotonic() + seconds
        for sweep in sweeps:
            try:
                sweep.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.complain(f"{sweep.output.stem} still runs {seconds:.0f} s after it should have ended")
                self.clear()
            sweep.reader.join(1.0)
            self.say(f"{sweep.output.stem} ended with {sweep.process.wait()}")

    def rest(self) -> None:
        """Stop everything, as kill -9 does, and wait for jobs to see it; a problem if they do not."""
        for sweep in self.running():
            sweep.signals.append(signal.SIGKILL)
            sweep.process.kill()
            sweep.process.wait()
            self.note("kill_sweep SIGKILL", f"{sweep.output.stem}, to damage files at rest")
        if left := self.leftover():
            self.complain(f"processes {left} outlive their sweep by {END_SECONDS:.0f} s")
            self.clear()

    def leftover(self) -> list[int]:
        """Processes that do not end although every sweep has, with some delay."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return left

    def clear(self) -> None:
        """End every process, whatever it does."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _copy(process: "subprocess.Popen[bytes]", output: Path) -> None:
    assert process.stdout
    with process.stdout, output.open("ab") as file:
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            file.write(piece)
            file.flush()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
