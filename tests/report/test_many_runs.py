"""Very many runs: what each costs is bounded, and what is left out is said."""

from simbal.report.collect import collect
from simbal.report.table import build


def rates(table):
    return [(row.arm.balancing, row.arm.label["optim.lr"].value) for row in table.rows]


def test_the_best_arms_come_with_what_they_are_compared_with(write_run):
    for place, lr in enumerate((0.1, 0.2, 0.3)):
        folder = write_run("lbl", keys={"optim.lr": lr}, metrics={"val/loss": 5.0 + place}).parent
        write_run("simbal", keys={"optim.lr": lr}, metrics={"val/loss": 4.0 - place})
    table = build("t", collect(folder))
    assert table.of_best(6) is table
    assert rates(table.of_best(4)) == [("lbl", 0.2), ("lbl", 0.3), ("simbal", 0.2), ("simbal", 0.3)]
    assert all(row.other for row in table.of_best(4).rows if row.arm.balancing == "simbal")
    pairs = build("t", collect(folder), pairs=True).of_best(2).pairs
    assert [(row.arm.name, row.other.name) for row in pairs] == [("simbal lr=0.3", "lbl lr=0.3")]
