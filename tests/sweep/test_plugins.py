"""Hydra finds our plugins, and they are the default."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from hydra_plugins.simbal_plugins.grid import combinations


def grid(*lines):
    return list(combinations(OverridesParser.create().parse_overrides(list(lines))))


def test_hydra_lists_our_sweeper_and_our_launcher():
    assert "GridSweeper" in {plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)}
    assert "ProcsLauncher" in {plugin.__name__ for plugin in Plugins.instance().discover(Launcher)}


def test_a_grid_is_every_combination_in_order():
    assert grid("balancing=a,b", "seed=0,1", "name=x") == [
        ["balancing=a", "seed=0", "name=x"],
        ["balancing=a", "seed=1", "name=x"],
        ["balancing=b", "seed=0", "name=x"],
        ["balancing=b", "seed=1", "name=x"],
    ]


def test_the_later_of_two_overrides_counts():
    assert grid("seed=0,1", "seed=7") == [["seed=7"]]


def test_lists_quotes_and_deletions_survive():
    assert grid("balancing=[a,b],c", "name='x,y'", "~seed") == [
        ["balancing=[a,b]", "name='x,y'", "~seed"],
        ["balancing=c", "name='x,y'", "~seed"],
    ]
