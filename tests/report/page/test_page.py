import json
import re
from html.parser import HTMLParser

import pytest

from simbal.errors import UserError
from simbal.report.page import page, tables
from simbal.report.page.styles import MOST_ARMS
from simbal.report.report import report

FIGURES = ["loss", "training-loss", "experts", "max-vio", "loads", "pes", "pes-rate-mean",
           "pes-rate-min", "dropping", "pruning"]  # fmt: skip


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def html(sweep, table_of):
    return lambda: page.html(table_of(sweep), sweep)


@pytest.fixture
def without_figures(monkeypatch):
    """They take most of the time that a page takes."""
    monkeypatch.setattr(page, "cards", lambda *_: [])


def figure_names(text):
    return re.findall(r'<figure id="figure-([^"]+)"', text)


def test_a_sweep_with_everything_has_every_figure_and_nothing_left_out(write_run, analyse, html):
    for balancing in ("lbl", "simbal"):
        for seed in (0, 1):
            analyse(write_run(balancing, seed))
    text = html()
    assert figure_names(text) == FIGURES
    assert "Left out" not in text
    assert "Paired difference to lbl" in text


def test_what_has_no_data_says_how_to_get_it(write_run, html, sweep):
    path = write_run(layers={})
    (path / "metrics.jsonl").unlink()
    text = html()
    assert figure_names(text) == []
    for how in ("trainer.pes_every=100", f"run={sweep} analysis=dropping", f"run={sweep} analysis=pruning"):
        assert how in text


def test_dense_runs_have_a_loss_and_no_experts(write_run, html):
    write_run(dense=True)
    text = html()
    assert figure_names(text) == FIGURES[:2]
    assert "a dense one has none" in text


def test_a_dense_arm_beside_one_with_experts_is_left_out_of_their_figures_alone(write_run, html):
    write_run("lbl", dense=True)
    write_run("simbal")
    assert figure_names(html()) == FIGURES[:-2]


def test_no_finished_run_still_makes_a_page(write_run, html):
    write_run(status="failed", error="out of memory")
    text = html()
    assert "out of memory" in text
    assert "<figure" not in text


@pytest.mark.usefixtures("without_figures")
def test_runs_without_a_result_are_shown_with_their_errors_and_linked(write_run, sweep):
    write_run("lbl")
    failed = write_run("simbal", status="failed", error="the loss is nan")
    (sweep / "sweep.json").write_text(
        json.dumps({"command": "train.py -m seed=0-1", "runs": {"never-0123": "balancing=none seed=9"}})
    )
    report(sweep)
    text = (sweep / "index.html").read_text()
    assert "train.py -m seed=0-1" in text
    for said in ("the loss is nan", f'href="./{failed.name}/"', "balancing=none seed=9", "never-0123", "missing"):
        assert said in text
    assert 'href="./never-0123/"' not in text


def test_the_page_asks_for_nothing_from_elsewhere(write_run, html):
    write_run()
    text = html()
    for tag, attrs in Elements(text).found:
        for name in ("src", "href", "xlink:href"):
            assert not re.match("(https?:)?//", attrs.get(name) or ""), (tag, attrs)
    assert not re.search(r"@import|url\((?!#)", text)


@pytest.mark.usefixtures("without_figures")
def test_keys_that_differ_stand_in_a_table_and_others_do_not(write_run, html):
    write_run("lbl")
    write_run("simbal")
    text = html()
    assert "balancing.simbal.coef" in text
    assert "model.d_model" not in text
    assert ">seed<" not in text.partition('id="config"')[2].partition("</section>")[0]


def test_figures_show_the_baseline_and_the_best_where_arms_are_many(write_run, sweep, table_of, html):
    write_run("lbl", metrics={"val/loss": 99.0})
    for i in range(MOST_ARMS + 3):
        write_run("simbal", keys={"optim.lr": i / 10}, metrics={"val/loss": 10.0 - i})
    shown = [arm.name for arm in page.figure_arms(table_of(sweep))]
    assert len(shown) == MOST_ARMS
    assert shown[0].startswith("lbl")
    assert not any("lr=0.3" in name for name in shown)
    assert f"{MOST_ARMS} of {MOST_ARMS + 4} arms" in html()


@pytest.mark.parametrize("content", ["{", "[]", '{"command": 7, "runs": {}}'])
def test_a_broken_sweep_file_is_an_error(write_run, sweep, html, content):
    write_run()
    (sweep / "sweep.json").write_text(content)
    with pytest.raises(UserError, match="sweep.json is broken"):
        html()


@pytest.mark.usefixtures("without_figures")
def test_a_number_whose_difference_is_not_resolved_is_marked_in_the_results_and_no_other(write_run, html):
    for seed, difference in enumerate((0.5, -0.5, 0.4)):
        write_run("lbl", seed, metrics={"val/ppl": 50.0, "val/bpb": 2.0})
        write_run("simbal", seed, metrics={"val/ppl": 50.0 + 20 * difference, "val/bpb": 1.0 + seed / 1000})
    results = html().partition('id="results"')[2].partition("</section>")[0]
    lbl, simbal = re.findall("<tr>.*?</tr>", results, re.DOTALL)[1:]
    assert "not resolved" not in lbl
    cells = re.findall("<td.*?</td>", simbal)
    assert [cell.startswith('<td class="dim"') for cell in cells if "not resolved" in cell] == [True]
    assert "52.667" in next(cell for cell in cells if "not resolved" in cell)


def test_the_script_s_curves_are_those_of_the_figures(write_run, html):
    for seed in (0, 1):
        write_run(seed=seed)
    charts = {chart["name"]: chart for chart in curves_in(html())}
    assert list(charts) == [name for name in FIGURES if name not in ("loads", "dropping", "pruning")]
    (panel,) = charts["loss"]["panels"]
    (curve,) = panel["curves"]
    assert panel["x"] == [0, 100, 200, 300, 400]
    assert (curve["arm"], curve["y"]) == ("simbal", [8.5, 7.5, 6.5, 5.5, 4.5])
    assert len(charts["pes"]["panels"]) == 2


def curves_in(text):
    return json.loads(re.search('id="curves">(.*?)</script>', text)[1])


@pytest.mark.usefixtures("without_figures")
def test_every_run_folder_is_a_relative_link_beside_its_arm(write_run, sweep, html, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MEANS", 2)
    paths = [write_run("lbl", seed, keys={"optim.lr": lr}) for seed in range(2) for lr in (0.1, 0.2, 0.3)]
    paths += [write_run("lbl", seed, keys={"optim.lr": 0.3}) for seed in range(2, 24)]
    text = html()
    folders = text.partition('id="runs"')[2]
    assert re.findall(r"(lbl lr=[^<>]+)</th>", folders) == [f"lbl lr=0.{i}" for i in (1, 2, 3)]
    assert re.findall(r"<summary>(\d+ runs)</summary>", folders) == ["24 runs"]
    assert all(f'<a href="./{path.name}/">' in folders for path in paths)
    assert "1 more are in the files below, and by name under Run folders" in text


@pytest.mark.usefixtures("without_figures")
def test_the_page_of_a_running_sweep_reloads_itself_and_that_of_a_finished_one_does_not(write_run, sweep, table_of):
    write_run()
    refreshes = [
        [attrs["content"] for _, attrs in Elements(text).found if attrs.get("http-equiv") == "refresh"]
        for text in (page.html(table_of(sweep), sweep, running) for running in (True, False))
    ]
    assert refreshes == [["30"], []]
