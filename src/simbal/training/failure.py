"""What one of several ranks says of its failure, before the others only notice that it is gone."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from simbal.training.ranks import is_first, world_size

KEY = "simbal/failure"
WAIT = timedelta(seconds=2)  # of the first rank for such a word: a connection can break before it arrives
_stores: list[Store] = []  # of this process's group


@contextmanager
def told_in(store: Store) -> Iterator[None]:
    """Within, ranks tell each other by `store`."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.remove(store)


def tell(says: Mapping[str, str], store: Store) -> None:
    """Say it, unless another rank has failed before."""
    with suppress(RuntimeError):  # the first rank, and with it the store, may be gone
        store.compare_set(KEY, "", json.dumps(dict(says)))


def heard(own: Mapping[str, str]) -> dict[str, str] | None:
    """What another rank has said of the failure that this rank notices as `own`; None if it is this rank's.

    On any but the first rank it tells what this rank has to say.
    """
    if world_size() == 1 or not _stores:
        return None
    if not is_first():
        tell(own, _stores[-1])
        return None
    with suppress(RuntimeError):
        _stores[-1].wait([KEY], WAIT)
        return dict(json.loads(_stores[-1].get(KEY)))
    return None
