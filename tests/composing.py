"""How the programs get from their arguments to runs, or to a refusal: nothing else in this folder knows.

A program is executed as its user does it, from the check of its command line on, in this process and up to the place
where it would begin to train. What is found out there is handed on as plain values.
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
from simbal.sweep.resume import labels
from tests.in_process import REPOSITORY, run

SEEN_IN_JOBS = ("params", "arms")  # of hydra.sweeper
PARSED: dict[str, Any] = {}  # configs by the text of their files
Facts = dict[str, Any]


class ReachedError(BaseException):
    """The program is where it would begin to train; Hydra turns every `Exception` into words."""


def compose(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[Facts]:
    """What there is to know of each run that `train.py` would do, in order, before it does the first.

    Of a search these are the runs of a grid's points, or else of points that show each choice and both ends of each
    interval; `search` says what is searched and how.
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
            points = space.grid() if settings.sampler == "grid" else space.probes()
            jobs = [job(lines) for point in points for lines in space.jobs(point)]
            keys = {key: value for key, value in asdict(settings).items() if key not in SEEN_IN_JOBS}
            search = {"arm": arm, **keys}
            found.extend(facts | {"search": search} for facts in _facts_of_all(jobs))
        raise ReachedError

    with (
        _working_folder({}),
        _stopping(train, launch),
        mock.patch("simbal.sweep.search.run.run_searches", run_searches),
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
    """The exit code of a program that refuses its arguments and what it says, without the names of this machine.

    Args:
        program: such as `train.py`.
        arguments: in which `<tmp>` is the working folder.
        files: what lies in the working folder, by path.
        environment: variables that are set.
        absent: modules that are not installed.

    Returns:
        No code if it does not refuse them.
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
    """Open the data and build the model, as a run does first of all, without reading the one or filling the other."""
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
    """Have `train` called in place of training, and `launch` in place of starting the jobs of a sweep."""
    training = ModuleType("simbal.training.run")
    training.train = train  # type: ignore[attr-defined]
    with (
        _modules({training.__name__: training}),
        mock.patch("simbal.sweep.resume.launch", launch),
        mock.patch("simbal.sweep.resume.require_launch"),  # which prepares data
    ):
        yield


@contextlib.contextmanager
def _modules(imported: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Have modules by name; with None there is none. What else is imported meanwhile stays: torch takes seconds."""
    before = {name: sys.modules[name] for name in imported if name in sys.modules}
    sys.modules.update(imported)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in imported:
            del sys.modules[name]
        sys.modules.update(before)


def _known_mode(arguments: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Spare Hydra to compose everything once more to find out `hydra.mode`, which a command line says or nobody."""
    said = any("hydra.mode" in argument for argument in arguments)
    return contextlib.nullcontext() if said else mock.patch.object(Hydra, "get_mode", return_value=None)


def _parsed_once() -> contextlib.AbstractContextManager[Any]:
    """Spare Hydra to parse the same files for each command, which is a third of the time."""
    load = OmegaConf.load

    def load_once(file: TextIO) -> Any:
        text = file.read()
        if text not in PARSED:
            PARSED[text] = load(io.StringIO(text))
        return copy.deepcopy(PARSED[text])

    return mock.patch.object(OmegaConf, "load", load_once)


def _ended(program: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int | None, str]:
    """The exit code and the standard error of a program; no code if it got to where it would begin to train."""
    variables = {"CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    gc.disable()  # a third of the time, as configs are full of cycles
    try:
        with _known_mode(arguments), _parsed_once():
            done = run(Path.cwd(), program, *arguments, environment=variables)
    except ReachedError:
        return None, ""
    finally:
        gc.enable()
    return done.returncode, done.stderr
