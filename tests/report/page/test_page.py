"""The page has every figure and table of a sweep, names missing results, and runs no foreign script."""

import json
import random
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from simbal.metrics.definitions import NUMBERS
from simbal.report import page
from simbal.report.report import read_table
from tests.report.page.conftest import HOSTILE, row, write_hostile, write_rows

FIGURES = ["loss", "loss-late", "training-loss", "experts", "max-vio", "loads", "pes", "pes-rate-mean", "pes-rate-min",
           "dropping", "pruning"]  # fmt: skip
OURS = ("#", "./", "data:,", "table.")  # beginnings of links


class Elements(HTMLParser):
    """Every element with its attributes, and the page's text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def html(sweep):
    return lambda: page.html(read_table(sweep), sweep)


def charted(text):
    return json.loads(re.search('id="charted">(.*?)</script>', text)[1])["figures"]


def curve_names(text):
    return [name for name in charted(text) if not name.startswith("difference-")]


def test_a_complete_sweep_has_every_figure_and_the_same_folder_gives_the_same_bytes(write_run, analyze, html):
    for balancing in ("lbl", "simbal"):
        for seed in (0, 1):
            analyze(write_run(balancing, seed))
    text = html()
    assert curve_names(text) == FIGURES
    assert "difference-val-ppl" in charted(text)
    assert "Figures without data" not in text
    assert "Paired difference from lbl" in text
    assert text == html()
    keys = text.partition('id="config"')[2].partition("</section>")[0]
    assert "balancing.simbal.coef" in keys
    assert "model.d_model" not in keys
    assert ">seed<" not in keys


def test_a_figure_without_data_says_how_to_get_it(write_run, html, sweep):
    path = write_run(layers={})
    (path / "metrics.jsonl").unlink()
    text = html()
    assert charted(text) == {}
    for how in ("trainer.pes_every=100", f"run={sweep} analysis=dropping", f"run={sweep} analysis=pruning"):
        assert how in text


def test_dense_runs_have_only_figures_of_losses(write_run, html):
    write_run("lbl", dense=True)
    assert curve_names(html()) == FIGURES[:3]


def test_runs_without_a_result_are_shown_with_their_errors_and_linked(write_run, sweep):
    failed = write_run("simbal", status="failed", error="the loss is nan")
    runs = {"never-0123": "balancing=none seed=9"}
    (sweep / "sweep.json").write_text(json.dumps({"command": "train.py -m seed=0-1", "runs": runs}))
    text = page.html(read_table(sweep), sweep)
    assert "train.py -m seed=0-1" in text
    for expected in ("the loss is nan", f'href="./{failed.name}/"', "balancing=none seed=9", "never-0123", "missing"):
        assert expected in text
    assert 'href="./never-0123/"' not in text


def test_only_numbers_whose_difference_is_not_resolved_are_marked(write_run, html):
    for seed, difference in enumerate((0.5, -0.5, 0.4)):
        write_run("lbl", seed, metrics={"val/ppl": 50.0, "val/bpb": 2.0})
        write_run("simbal", seed, metrics={"val/ppl": 50.0 + 20 * difference, "val/bpb": 1.0 + seed / 1000})
    text = html()
    results = text.partition('id="results"')[2].partition("</section>")[0]
    lbl, simbal = re.findall("<tr>.*?</tr>", results, re.DOTALL)[1:]
    assert "not resolved" not in lbl
    cells = re.findall("<td.*?</td>", simbal)
    assert [cell.startswith('<td class="dim"') for cell in cells if "not resolved" in cell] == [True]
    assert "52.667" in next(cell for cell in cells if "not resolved" in cell)
    (rows,) = charted(text)["difference-val-bpb"]["rows"]
    assert (rows["arm"], rows["conclusion"]) == (["simbal"], ["better"])
    assert rows["low"][0] < rows["mean"][0] < rows["high"][0] < 0


def test_the_conclusion_names_a_few_arms_and_counts_many(write_run, sweep):
    for seed in (0, 1):
        write_run("lbl", seed, metrics={"val/ppl": 50.0 + seed})
        write_run("simbal", seed, metrics={"val/ppl": 40.0 + 0.99 * seed})
    assert re.match(r"Perplexity vs\. lbl: simbal -\d.*% \[.*\]", page.verdict(read_table(sweep)))
    for place in range(page.MOST_IN_VERDICT):
        write_run("none", 0, keys={"balancing.none.note": place}, metrics={"val/ppl": 60.0 + place})
    assert "4 not resolved" in page.verdict(read_table(sweep))
    assert "none" not in page.verdict(read_table(sweep))


def test_only_the_page_of_a_running_sweep_reloads(write_run, sweep):
    write_run()
    for running in (True, False):
        text = page.html(read_table(sweep), sweep, running)
        assert ('http-equiv="refresh" content="30"' in text) == running


def test_the_list_of_sweeps_links_each_page_with_its_verdict_and_leaves_out_copies_elsewhere(
    write_run, sweep, tmp_path
):
    for seed in (0, 1):
        write_run("lbl", seed, ended=f"2026-01-0{seed + 1}T10:00:00+00:00")
        write_run("simbal", seed)
    copy = shutil.copytree(sweep, sweep.with_name("second <b>"))
    for folder in (sweep, copy):
        page.write(read_table(folder), folder)
    listed = Elements((sweep.parent / "index.html").read_text())
    links = [attributes["href"] for tag, attributes in listed.found if tag == "a"]
    assert sorted(links) == ["./fake/index.html", "./second%20%3Cb%3E/index.html"]
    assert all(
        text in listed.text for text in ("second <b>", "0-1", "2026-01-02 10:00", page.verdict(read_table(sweep)))
    )
    elsewhere = shutil.copytree(sweep, tmp_path / "elsewhere" / "fake")
    page.write(read_table(elsewhere), elsewhere)
    assert not (tmp_path / "elsewhere" / "index.html").exists()


def test_texts_from_files_never_become_markup(write_run, sweep):
    """There are no other tags than in a harmless page, no handlers, no outside links and no scripts of others."""
    write_hostile(write_run, sweep, "words")
    harmless = page.html(read_table(sweep), sweep)
    write_hostile(write_run, sweep, " ".join(HOSTILE))
    hostile = page.html(replace(read_table(sweep), name=HOSTILE[0]), sweep)
    plain, found = Elements(harmless), Elements(hostile)
    assert {tag for tag, _ in found.found} <= {tag for tag, _ in plain.found}
    scripts = re.findall("<script>(.*?)</script>", hostile, re.DOTALL)
    assert scripts == re.findall("<script>(.*?)</script>", harmless, re.DOTALL)
    digests = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    policy = next(attributes["content"] for _, attributes in found.found if "http-equiv" in attributes)
    assert re.search("default-src 'none';.* script-src ([^;]*);", policy)[1].split() == digests
    assert HOSTILE[0] in found.text
    for tag, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("srcdoc", "formaction")], tag
        for name in ("href", "src", "action", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(OURS), (tag, attributes)


@pytest.mark.slow
def test_the_page_of_a_hundred_arms_is_smaller_than_two_megabytes(write_run, sweep, html):
    noise = random.Random(0)
    for arm in range(100):
        for seed in (0, 1):
            keys = {"balancing.simbal.coef": arm / 1000} if arm else {}
            metrics = {metric.key: noise.uniform(1, 9) for metric in NUMBERS if metric.where == "val/"}
            path = write_run("simbal" if arm else "lbl", seed, keys=keys, metrics=metrics)
            rows = [row(step, noise.random(), False) for step in range(0, 600, 20)]
            for each in rows:
                each["layers"]["val/pes"] = [noise.random() for _ in range(6)]
            write_rows(path, rows)
    text = html()
    assert len(text.encode()) < 2_000_000
    assert "40 best of 99 arms" in text
    assert min(len(line["y"]) for line in charted(text)["loss"]["rows"]) >= page.FEWEST_POINTS


def test_every_run_folder_is_linked_and_tables_are_limited_to_the_best_arms(write_run, html, monkeypatch):
    monkeypatch.setattr(page, "MOST_TABLE_ARMS", 2)
    paths = [write_run("lbl", 0, keys={"optim.lr": lr}) for lr in (0.1, 0.2, 0.3)]
    paths += [write_run("lbl", seed, keys={"optim.lr": 0.3}) for seed in range(1, 22)]
    text = html()
    folders = text.partition('id="runs"')[2]
    assert re.findall(r"(lbl lr=[^<>]+)</th>", folders) == [f"lbl lr=0.{i}" for i in (1, 2, 3)]
    assert re.findall(r"<summary>(\d+ runs)</summary>", folders) == ["22 runs"]
    assert all(f'<a href="./{path.name}/">' in folders for path in paths)
    assert "1 more are in the files below" in text


def test_vegas_scripts_are_cached_and_a_read_only_cache_does_not_matter(tmp_path, monkeypatch):
    bundled = []
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda vl_version: bundled.append(vl_version) or "bundle")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}")
    assert [page._vega_scripts(), page._vega_scripts()] == ["bundle", "bundle"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'file'}")
    assert page._vega_scripts() == "bundle"
    assert len(bundled) == 2
