"""Compose the runs of a command, or return its error, without training.

A program runs in this process, from its command line to the point where it would start to train.
"""

import contextlib
import copy
import gc
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from unittest import mock

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from simbal.config.values import flatten
from simbal.runs.spec import RunSpec
from simbal.sweeping.plan import labels
from tests.in_process import REPOSITORY, run

SEEN_IN_JOBS = ("params", "arms")  # of hydra.sweeper
PARSED: dict[str, Any] = {}  # configs by the text of their files
Facts = dict[str, Any]


class ReachedError(BaseException):
    """The program would start to train. Not an `Exception`, as Hydra translates those."""


def compose(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[Facts]:
    """Return facts about each run of a `train.py` command, in order.

    A search has the runs that cover each choice and both ends of each interval; `search` has its settings.
    """
    found: list[Facts] = []

    def train(spec: RunSpec) -> None:
        found.append(_facts([], None, spec))
        raise ReachedError

    def launch(jobs: Sequence[Any], *_: Any) -> None:
        found.extend(_facts_of_all(jobs))
        raise ReachedError

    def run_searches(spaces: Mapping[str, Any], settings: Any, job: Callable[[list[str]], Any], *_: Any) -> None:
        for arm, space in spaces.items():
            jobs = [job(lines) for point in space.probes() for lines in space.jobs(point)]
            keys = {key: value for key, value in asdict(settings).items() if key not in SEEN_IN_JOBS}
            search = {"arm": arm, **keys}
            found.extend(facts | {"search": search} for facts in _facts_of_all(jobs))
        raise ReachedError

    with (
        _working_folder({}),
        _stopping(train, launch),
        mock.patch("simbal.sweeping.search.search.run_searches", run_searches),
    ):
        code, said = _ended("train.py", arguments, environment)
    if code is not None:
        raise AssertionError(f"train.py {' '.join(arguments)} ended with exit code {code}: {said}")
    return found


def refusal(
    program: str,
    arguments: Sequence[str],
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    absent: Sequence[str] = (),
) -> tuple[int | None, str]:
    """Return the exit code and the error of a program that refuses its arguments.

    Args:
        program: such as `train.py`.
        arguments: `<tmp>` stands for the working folder.
        files: content of files in the working folder, by path.
        environment: environment variables.
        absent: modules that count as not installed.

    Returns:
        The code, which is None if the program would start to train, and the error without local paths.
    """
    missing = dict.fromkeys(absent)
    with _working_folder(files or {}) as folder, _stopping(_begin, _begin_all), _modules(missing):
        given = [argument.replace("<tmp>", str(folder)) for argument in arguments]
        code, said = _ended(program, given, environment)
    return code, said.strip().replace(str(folder), "<tmp>").replace(str(REPOSITORY), "<repository>")


def _facts_of_all(jobs: Sequence[Any]) -> list[Facts]:
    return [_facts(job, label, job.spec) for job, label in zip(jobs, labels(jobs), strict=True)]


def _facts(overrides: Sequence[str], label: str | None, spec: RunSpec) -> Facts:
    return {
        "overrides": [*overrides], "label": label, "choices": spec.choices, "folder": str(spec.path),
        "hash": spec.hash, "written": spec.written, "flat": flatten(spec.written), "search": None,
    }  # fmt: skip


def _begin(spec: RunSpec) -> None:
    """Check the data and the model, as a run does at its start."""
    from simbal.data.prepare import open_source
    from simbal.training.build import check_buildable

    open_source(spec.config.data).identity()
    check_buildable(spec, here=True)
    raise ReachedError


def _begin_all(jobs: Sequence[Any], *_: Any) -> None:
    _begin(jobs[0].spec)


@contextlib.contextmanager
def _working_folder(files: Mapping[str, str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for file, content in files.items():
            path = Path(name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        yield Path(name)


@contextlib.contextmanager
def _stopping(train: Callable[..., None], launch: Callable[..., None]) -> Iterator[None]:
    """Replace training by `train`, and the launch of a sweep's jobs by `launch`."""
    training = ModuleType("simbal.training.run")
    training.train = train  # type: ignore[attr-defined]
    with (
        _modules({training.__name__: training}),
        mock.patch("simbal.sweeping.plan.launch", launch),
        mock.patch("simbal.sweeping.checks.prepare_launch"),  # which prepares data
    ):
        yield


@contextlib.contextmanager
def _modules(imported: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Replace modules by name; None means not installed. Other imports are kept, as torch takes seconds."""
    before = {name: sys.modules[name] for name in imported if name in sys.modules}
    sys.modules.update(imported)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in imported:
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def cheap_hydra(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra parse each file once and compose once, and do not collect garbage, as configs are full of cycles."""
    load = OmegaConf.load

    def load_once(file: TextIO) -> Any:
        text = file.read()
        if text not in PARSED:
            PARSED[text] = load(io.StringIO(text))
        return copy.deepcopy(PARSED[text])

    gc.disable()
    try:
        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(OmegaConf, "load", load_once))
            if not any("hydra.mode" in argument for argument in arguments):  # else Hydra composes once more to find it
                patched.enter_context(mock.patch.object(Hydra, "get_mode", return_value=None))
            yield
    finally:
        gc.enable()


def _ended(program: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int | None, str]:
    """Return the exit code and the standard error of a program; no code if it reached the start of training."""
    variables = {"CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    try:
        with cheap_hydra(arguments):
            done = run(Path.cwd(), program, *arguments, environment=variables)
    except ReachedError:
        return None, ""
    return done.returncode, done.stderr
