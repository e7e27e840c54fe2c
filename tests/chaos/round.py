"""One round: a sweep that is disturbed some times and then left alone."""

import time

from tests.chaos.faults import Bag
from tests.chaos.scene import Scene

STARTING_SECONDS = 4.0  # of a sweep, before its first job
LEFT_ALONE = 0.15  # at most, between the first job and a fault, as a share of what a sweep takes
DEADLINE_SECONDS = 60.0  # for a sweep to end, beside ten times what it usually takes


def disturb(scene: Scene, bag: Bag, faults: int, seconds: float, deadline: float) -> None:
    """Inject so many faults, or fewer if the sweep is complete or the time over.

    Args:
        scene: with no sweep yet.
        bag: what to inject; what cannot come about is put back.
        faults: how many to try.
        seconds: what an undisturbed sweep takes.
        deadline: of the monotonic clock.
    """
    for _ in range(faults):
        fault, draws = bag.draw()
        if not scene.running() and not scene.complete:
            scene.start()
        if draws.random() < 0.25:
            scene.wait(draws.uniform(0.0, STARTING_SECONDS))
        else:
            scene.wait(2 * seconds, lambda: bool(scene.jobs()))
            scene.wait(draws.uniform(0.0, LEFT_ALONE * seconds))
        over, useless = time.monotonic() > deadline, scene.complete and not fault.after_end
        before = len(scene.injected)
        if not over and not useless:
            fault.inject(fault.kind, scene, draws)
        if fault.kind not in scene.injected[before:]:
            bag.put_back(fault)
        if over or useless:
            return


def finish(scene: Scene, seconds: float) -> None:
    """Let the sweep come to its end, then give the command again, once: that has to do what is left."""
    limit = DEADLINE_SECONDS + 10 * seconds
    scene.await_end(scene.running(), limit)
    sweep = scene.start()
    scene.await_end([sweep], limit)
    if sweep.process.returncode:
        scene.complain(f"{sweep.output.name}, which nothing disturbed, ended with {sweep.process.returncode}")
    if left := scene.leftover():
        scene.complain(f"processes {left} are left when the sweep has ended")
