import os
import time
import webbrowser
from pathlib import Path

import pytest

from simbal.cli import watch
from simbal.report.page import page


@pytest.fixture
def opened(monkeypatch):
    found = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or True)
    return found


@pytest.fixture
def written(monkeypatch):
    """The folders whose page was written."""
    folders = []

    def write(table, folder):
        folders.append(folder)
        (folder / "index.html").write_text("a page")

    monkeypatch.setattr(page, "write", write)
    return folders


@pytest.fixture
def folder(write_run, tmp_path):
    run = write_run()
    (run / "metrics.jsonl").write_text("")
    return tmp_path / "outputs/fake"


def test_it_prints_the_path_and_opens_the_page(folder, opened, written, capsys):
    watch.main([str(folder)])
    file = folder / "index.html"
    assert capsys.readouterr().out == f"{file}\n"
    assert opened == [file.as_uri()]
    watch.main([str(folder), "--no-open"])
    assert len(opened) == 1


def test_a_page_is_written_if_it_is_missing_or_older_than_a_curve_and_else_left(folder, written):
    for expected in (1, 1):
        watch.page_of(folder)
        assert len(written) == expected
    (curves,) = folder.glob("*/metrics.jsonl")
    os.utime(curves, (time.time() + 10, time.time() + 10))
    watch.page_of(folder)
    assert written == [folder, folder]


def test_the_page_of_a_running_sweep_is_left_to_the_sweep(folder, written):
    page_file = folder / "index.html"
    page_file.write_text(f'<span id="live" data-every="3.0" data-written="{time.time():.1f}"></span>')
    os.utime(page_file, (1, 1))
    watch.page_of(folder)
    assert written == []
    page_file.write_text(f'<span id="live" data-every="3.0" data-written="{time.time() - 1000:.1f}"></span>')
    os.utime(page_file, (1, 1))
    watch.page_of(folder)
    assert written == [folder]


def test_the_name_of_a_sweep_is_enough(folder, written, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert watch.page_of(Path("fake")) == folder / "index.html"


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="error: there is no folder"):
        watch.main([str(tmp_path / "nothing"), "--no-open"])
    assert not (tmp_path / "nothing").exists()


def test_without_a_browser_it_says_so(folder, written, monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    watch.main([str(folder)])
    assert "no browser was found" in capsys.readouterr().err
