"""Balancing strategies on the routers of a Hugging Face MoE: `with attach(model, SimBal()) as balancing: ...`.

`describe(model)` says what a model's own code does about balance; `simbal.attach.trainer` is for the Trainer.
"""

from simbal.attach.attachment import Attachment, attach
from simbal.host.describe import Description, describe

__all__ = ["Attachment", "Description", "attach", "describe"]
