"""The error of a dead job is what it said last."""

import pytest

from simbal.sweep.last_words import last_words

TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n    f()\n{}\n"


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("step 1\nerror: no space left\n", 1, "no space left"),
        (
            TRACEBACK.format("ValueError: bad") + "\nSet the environment variable HYDRA_FULL_ERROR=1\n",
            1,
            "ValueError: bad",
        ),
        (
            TRACEBACK.format("KeyError: 1") + "\nDuring handling\n\n" + TRACEBACK.format("OSError: 2\nmore"),
            1,
            "OSError: 2",
        ),
        (TRACEBACK.format("ValueError: bad") + "error: no space left\n", 1, "no space left"),
        ("step 1\n", -9, "killed by signal 9"),
        ("error: only a warning\n", -9, "killed by signal 9"),
        ("step 1\n", 0, "ended with exit code 0 and no result"),
        ("", 3, "ended with exit code 3 and no result"),
        ("\xff\n", 3, "ended with exit code 3 and no result"),
    ],
)
def test_last_words(tmp_path, said, status, words):
    console = tmp_path / "console.log"
    console.write_text("error: of an earlier attempt\n" + said, encoding="latin-1")
    assert last_words(console, len("error: of an earlier attempt\n"), status) == words
