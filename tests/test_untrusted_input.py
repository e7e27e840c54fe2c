"""Files that the programs read cannot execute code: by every call in the sources, and for a hostile run folder."""

import ast
from functools import cache
from pathlib import Path

import pytest

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from tests.in_process import REPOSITORY, run

SOURCES = sorted([*REPOSITORY.glob("*.py"), *(REPOSITORY / "src").rglob("*.py")])
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "marshal.loads", "marshal.load", "shelve.open",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "joblib.load", "torch.jit.load", "pandas.read_pickle",
    "np.fromstring", "pickle.load", "pickle.loads", "pickle.Unpickler",
}  # fmt: skip
FORBIDDEN_IMPORTS = ("from pickle import", "from marshal", "import dill", "import cloudpickle", "from yaml import")


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


@cache
def all_calls() -> list[tuple[str, ast.Call]]:
    nodes = [node for file in SOURCES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]


def calls(*names: str) -> list[ast.Call]:
    found = [call for name, call in all_calls() if name in names]
    assert found
    return found


def test_nothing_is_evaluated_or_unpickled():
    assert {name for name, _ in all_calls()} & FORBIDDEN == set()
    texts = {file: file.read_text(encoding="utf-8") for file in SOURCES}
    assert [(file, line) for file, text in texts.items() for line in FORBIDDEN_IMPORTS if line in text] == []


def test_libraries_are_called_in_their_safe_modes():
    assert all(keywords(call).get("weights_only") == "True" for call in calls("torch.load"))
    assert {ast.unparse(call.args[1]) for call in calls("yaml.load")} == {"yaml.CSafeLoader"}
    arrays = calls("np.load", "numpy.load", "np.memmap", "np.fromfile", "np.frombuffer")
    assert all(keywords(call).get("allow_pickle", "False") == "False" for call in arrays)
    assert all(keywords(call).get("shell", "False") == "False" for _, call in all_calls())


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['touch pwned']", "\xff", "name: ../../x\nchoices: {balancing: [a]}"],
    ids=["tag", "latin", "partial"],
)
def test_hostile_config_of_a_run_is_refused_with_a_one_sentence_error(write_run, text, tmp_path):
    path: Path = write_run()
    (path / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.yaml is not a config written by simbal"):
        RunFolder(path).read_spec()
    refused = run(tmp_path, "report.py", str(path.parent))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {path / 'config.yaml'} is not a config written by simbal")
    assert refused.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["outputs"]
