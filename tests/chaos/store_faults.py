"""What goes wrong with a store, and what it is there for: requests fail, and a machine goes away with its disk."""

import shutil
from random import Random

from tests.chaos.scene import Scene
from tests.store.s3_server import ANSWERS, REQUESTS

WAYS = (*ANSWERS, "reset", "lost", "hang")  # a `reset` breaks off in the middle of an upload
ONCE, OUTAGE = 1, 10**6  # requests that fail
ASKED_SECONDS = 40.0  # most until there is such a request


def fail_store(kind: str, scene: Scene, draws: Random) -> None:
    """Let one request of a kind fail, or every one for some seconds."""
    if scene.server is None or not scene.running():
        return
    way, requests, times = draws.choice(WAYS), draws.choice(sorted(REQUESTS)), draws.choice((ONCE, ONCE, OUTAGE))
    seconds, server, before = draws.uniform(1.0, 20.0), scene.server, len(scene.server.struck)
    server.fails(REQUESTS[requests], way, times)
    if scene.wait(ASKED_SECONDS, lambda: len(server.struck) > before) and times == OUTAGE:
        scene.wait(seconds)
    server.faults.clear()
    if struck := len(server.struck) - before:
        scene.note(kind, f"{way} at {struck} x {requests}")


def lose_machine(kind: str, scene: Scene, draws: Random) -> None:
    """Stop everything and delete all that is on the disk, or the folder of a run; the store is what is left."""
    scene.rest()
    runs = sorted(file.parent for file in scene.outputs.glob("default/*/config.yaml"))
    if not runs:
        return
    gone = sorted(scene.outputs.iterdir()) if draws.random() < 0.6 else [draws.choice(runs)]
    for folder in gone:
        shutil.rmtree(folder)
    scene.note(kind, ", ".join(folder.name for folder in gone))
