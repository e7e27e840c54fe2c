"""Hugging Face transformers models: balance, describe, measure, load and export them.

`attach` adds balancing strategies to the routers of a Mixture-of-Experts, `describe` reports how the model's own code
balances load, `record` and `replay` reuse the experts of another forward pass, and `from_pretrained` loads a folder as
a `Transformer`. For the Trainer, see `simbal.hf.trainer`.
"""

from simbal.hf.attach import Attachment, attach
from simbal.hf.convert import from_pretrained
from simbal.hf.describe import Description, describe
from simbal.hf.replay import Routes, record, replay

__all__ = ["Attachment", "Description", "Routes", "attach", "describe", "from_pretrained", "record", "replay"]
