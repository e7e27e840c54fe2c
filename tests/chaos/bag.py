"""Faults in an order that a seed decides, each kind as often as its weight says."""

from collections.abc import Sequence
from random import Random

from tests.chaos.faults import Fault


class Bag:
    """Filled anew when it is empty."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults, self.seed = faults, seed
        self.drawn = 0
        self.left: list[Fault] = []
        self._order = Random(seed)

    def draw(self) -> tuple[Fault, Random]:
        """The next fault, and the choices that it is to make."""
        if not self.left:
            self.left = [fault for fault in self.faults for _ in range(fault.weight)]
            self._order.shuffle(self.left)
        self.drawn += 1
        return self.left.pop(0), Random(f"{self.seed}/fault {self.drawn}")

    def put_back(self, fault: Fault) -> None:
        """It could not come about: it is drawn again when the others have been."""
        self.left.append(fault)
