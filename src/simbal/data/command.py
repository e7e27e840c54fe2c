"""What prepare.py does with its config."""

from typing import Any

from simbal.config_check import check_data
from simbal.data.check import check
from simbal.data.store import Plan, prepare
from simbal.data.store_meta import require_meta
from simbal.errors import UserError


def prepare_or_check(data: dict[str, Any], checking: Any) -> list[str]:
    """Lines that say what the store holds; if `checking`, of an existing one that was read to its last byte.

    Raises:
        UserError: for a bad config, bad input, or a store that is absent or damaged.
    """
    if not isinstance(checking, bool):
        raise UserError(f"check={checking} must be true or false")
    check_data(data)
    if not checking:
        return [prepare(data, progress=True).summary()]
    plan = Plan.of(data)
    if not plan.path.exists():
        raise UserError(f"nothing is prepared yet in {plan.path}: leave out check=true")
    store = plan.open()
    found = check(store, data["tokenizer_path"])
    require_meta(store.path, store.meta)  # of the rest, nothing of which is told by other files
    return [store.summary(), *found]
