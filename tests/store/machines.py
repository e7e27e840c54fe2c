"""Machines that share a store: each has a folder of its own for the run, and what one does can be cut in anywhere."""

from collections.abc import Callable
from pathlib import Path

from simbal.runs.folder import RunFolder
from simbal.store.bucket import Bucket
from simbal.store.stored_run import StoredRun

OPERATIONS = ("names", "read", "write", "create", "send", "fetch", "delete")


class Killed(BaseException):
    """A process ends here and now."""


class CutBucket(Bucket):
    """Calls `cut` before its operation `at`, or after that one is done; deletions count one by one."""

    def __init__(self, url: str, at: int, after: bool, cut: Callable[[], None]) -> None:
        super().__init__(url)
        self.at, self.after, self.cut, self.count = at, after, cut, 0

    def passes(self, operation):
        self.count += 1
        here = self.count == self.at
        if here and not self.after:
            self.cut()
        done = operation()
        if here and self.after:
            self.cut()
        return done

    def delete(self, names):
        for name in names:
            self.passes(lambda name=name: Bucket.delete(self, [name]))


def _cut(name):
    def operation(self, *arguments):
        return self.passes(lambda: getattr(Bucket, name)(self, *arguments))

    return operation


for _name in OPERATIONS[:-1]:
    setattr(CutBucket, _name, _cut(_name))


class DeadBucket(CutBucket):
    """Kills its process at the operation `at`; nothing that this process tries afterwards comes to the store."""

    def __init__(self, url: str, at: int, after: bool) -> None:
        super().__init__(url, at, after, self.kill)
        self.dead = False

    def kill(self) -> None:
        self.dead = True
        raise Killed

    def passes(self, operation):
        if self.dead:
            raise Killed
        return super().passes(operation)


class Machine:
    """A machine with a folder for the run."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder = RunFolder(folder / "run")
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.stored = StoredRun(bucket, "name", self.folder)

    def train(self, step: int, by: str) -> None:
        """Leave what training up to a step leaves: the two newest checkpoints, and curves that grow."""
        checkpoints = self.folder.path / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        (self.folder.path / "config.yaml").write_text("name: name\n")
        with (self.folder.path / "metrics.jsonl").open("a") as curves:
            curves.write(f"{step} {by}\n")
        (checkpoints / f"step-{step:08}.ckpt").write_text(f"weights of {by} at {step}")
        for old in sorted(checkpoints.iterdir())[:-2]:
            old.unlink()

    def files(self) -> dict[str, str]:
        """The content of each file of the run."""
        root = self.folder.path
        found = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return {path.relative_to(root).as_posix(): path.read_text() for path in found}


def seen(folder: Path, bucket: Bucket) -> dict[str, str]:
    """What a machine that has nothing yet sees of the run, with its checkpoints."""
    reader = Machine(folder, bucket)
    reader.stored.fetch_whole()
    return reader.files()
