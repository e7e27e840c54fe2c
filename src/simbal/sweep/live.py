"""Keeps the pages of a sweep, index.html in its folders, up to date while its jobs run, by whichever launcher."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from simbal.errors import UserError
from simbal.report.page.live import LivePage
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job
from simbal.sweep.resume import labels

LEAST_SECONDS = 3.0  # between two writings
MOST_SECONDS = 60.0  # after the first look at very many runs, which takes seconds
SHARE = 0.005  # of a core, at most: the jobs need the rest


class LivePages:
    """A thread that writes the pages within a `with` block.

    The pages of a sweep that an error or a signal ends say so. Else a page stays as it is until the report replaces it.
    """

    def __init__(self) -> None:
        self.pages: list[LivePage] = []
        self.over, self.thread = threading.Event(), threading.Thread(target=self._write, name="live-page", daemon=True)
        self.every = LEAST_SECONDS

    def __enter__(self) -> "LivePages":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        for page in self.pages if kind else ():
            if page.written:
                with suppress(UserError):
                    page.write(self.every, stopped=True)

    def follow(self, jobs: Sequence[Job]) -> None:
        """Show these jobs from now on."""
        runs: dict[Path, dict[str, tuple[str, RunSpec]]] = defaultdict(dict)
        for job, label in zip(jobs, labels(jobs), strict=True):
            runs[job.spec.path.parent].setdefault(job.spec.path.name, (label, job.spec))
        self.pages = [LivePage(folder, [*of_folder.values()]) for folder, of_folder in runs.items()]

    def end(self) -> None:
        """Write no more."""
        self.over.set()
        self.thread.join()

    def _write(self) -> None:
        while not self.over.wait(self.every):
            before = time.thread_time()
            for page in self.pages:
                with suppress(UserError):  # of a full disk, say, of which the jobs speak
                    page.write(self.every)
            self.every = min(MOST_SECONDS, max(LEAST_SECONDS, (time.thread_time() - before) / SHARE))
