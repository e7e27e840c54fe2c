"""Faults in an order that a seed decides, each kind as often as its weight says."""

from collections.abc import Collection, Sequence
from random import Random

from tests.chaos.faults import Fault


class Bag:
    """Filled anew when it has nothing that fits."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults, self.seed = faults, seed
        self.drawn = 0
        self.left: list[Fault] = []
        self._order = Random(seed)

    def draw(self, has: Collection[str]) -> tuple[Fault, Random]:
        """The next fault that needs something of `has`, and the choices that it is to make; others wait."""
        while not (fitting := [fault for fault in self.left if fault.needs in has]):
            self.left = [fault for fault in self.faults for _ in range(fault.weight)]
            self._order.shuffle(self.left)
        self.left.remove(fitting[0])
        self.drawn += 1
        return fitting[0], Random(f"{self.seed}/fault {self.drawn}")

    def put_back(self, fault: Fault) -> None:
        """It could not come about: it is drawn again when the others have been."""
        self.left.append(fault)
