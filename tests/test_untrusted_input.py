"""Nothing that is read can become code: proven of every call in the sources, and tried with a hostile run folder."""

import ast
from functools import cache
from pathlib import Path

import pytest

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from tests.programs import REPOSITORY, run

SOURCES = sorted([*REPOSITORY.glob("*.py"), *(REPOSITORY / "src").rglob("*.py")])
NEVER = (
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "marshal.loads", "marshal.load", "shelve.open",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "joblib.load", "torch.jit.load",
    "pandas.read_pickle", "np.fromstring",
)  # fmt: skip
ALIASES = ("from pickle import", "from marshal", "import dill", "import cloudpickle", "from yaml import")


@cache
def calls(file: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a file by its dotted name."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def places(*names: str) -> list[tuple[str, ast.Call]]:
    """The calls of these names, each with its file relative to the repository."""
    return [
        (str(file.relative_to(REPOSITORY)), call) for file in SOURCES for name, call in calls(file) if name in names
    ]


def test_nothing_is_evaluated_or_unpickled():
    assert places(*NEVER) == []
    assert places("pickle.load", "pickle.loads", "pickle.Unpickler") == []
    imported = [(file, line) for file in SOURCES for line in file.read_text().splitlines() if "import" in line]
    assert not [(file, line) for file, line in imported if any(alias in line for alias in ALIASES)]


def test_checkpoints_are_read_as_weights_alone():
    found = places("torch.load")
    assert found
    assert all(keywords(call).get("weights_only") == "True" for _, call in found)


def test_yaml_is_read_without_tags_of_python():
    found = places("yaml.load")
    assert found
    assert {ast.unparse(call.args[1]) for _, call in found} == {"yaml.CSafeLoader"}


def test_arrays_are_never_objects():
    found = places("np.load", "numpy.load", "np.memmap", "np.fromfile", "np.frombuffer")
    assert found
    assert not [call for _, call in found if keywords(call).get("allow_pickle", "False") != "False"]


def test_a_shell_is_never_asked():
    assert not [call for file in SOURCES for _, call in calls(file) if keywords(call).get("shell", "False") != "False"]


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch pwned']",
        "a: !!python/object/apply:os.system ['touch pwned']",
        "\xff",
        "name: ../../x\nchoices: {balancing: [a]}",
    ],
    ids=["tag", "value", "latin", "partial"],
)
def test_a_hostile_config_of_a_run_is_one_sentence_of_report_py(write_run, text, tmp_path):
    path = write_run()
    (path / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.yaml is not a config written by simbal"):
        RunFolder(path).read_spec()
    refused = run("report.py", str(path.parent), cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {path / 'config.yaml'} is not a config written by simbal")
    assert refused.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["outputs"]
