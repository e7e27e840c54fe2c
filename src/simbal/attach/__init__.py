"""Balancing strategies on the routers of a Hugging Face MoE: `with attach(model, SimBal()) as balancing: ...`."""

from simbal.attach.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
