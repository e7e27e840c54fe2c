"""Loggers that come with an optional package: a sentence for one that is not installed."""

from importlib.util import find_spec

from simbal.errors import UserError

EXTRAS = {"mlflow": "mlflow", "wandb": "wandb"}  # by logger, the extra and the module alike


def check_logger(kind: str) -> None:
    """`UserError` if what `logger=<kind>` writes to is not installed."""
    if kind in EXTRAS and find_spec(EXTRAS[kind]) is None:
        raise UserError(f"logger={kind} is not installed: pip install 'simbal[{EXTRAS[kind]}]'")
