"""A mistake is refused in the words in which it was refused when it was pinned, and with the same exit code."""

import pytest

from tests.golden import pins

PINNED = pins.read(pins.REFUSALS)
CASES = [
    pytest.param(entry, id=f"{topic}: {entry['program']} {entry['arguments']}")
    for topic, entries in PINNED.items() for entry in entries
]  # fmt: skip


@pytest.mark.parametrize("entry", CASES)
def test_a_mistake_is_refused_in_the_words_that_it_was(entry):
    assert pins.question(entry) | pins.refusal(entry) == entry


def test_what_is_pinned_is_a_refusal():
    for entry in (entry for entries in PINNED.values() for entry in entries):
        assert entry["code"] in (1, 2), entry
        assert entry["sentence"], entry
        assert "Traceback" not in entry["sentence"], entry


def test_everyday_mistakes_of_every_program_are_one_sentence_each():
    entries = PINNED["everyday mistakes"]
    assert len(entries) >= 70
    assert {entry["program"] for entry in entries} == {
        f"{program}.py" for program in ("train", "prepare", "evaluate", "report", "export")
    }
    for entry in entries:
        assert entry["sentence"].startswith("error: "), entry
        assert "\n" not in entry["sentence"], entry
        assert not any(word in entry["sentence"] for word in ("HYDRA_FULL_ERROR", "OmegaConf", "in struct")), entry


@pytest.mark.parametrize("file", [pins.COMMANDS, pins.REFUSALS], ids=["commands", "refusals"])
def test_the_files_are_written_by_their_program(file):
    assert file.read_text(encoding="utf-8") == pins.text_of(file, pins.read(file))
