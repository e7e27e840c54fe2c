"""Models of Hugging Face transformers: balance, describe, measure, read and write them.

`attach` puts balancing strategies on the routers of a Mixture-of-Experts, `describe` reports what the model's own code
does about balance, `from_pretrained` reads a folder as a `Transformer`. `simbal.hf.trainer` is for the `Trainer`.
"""

from simbal.hf.attach import Attachment, attach
from simbal.hf.convert import from_pretrained
from simbal.hf.describe import Description, describe

__all__ = ["Attachment", "Description", "attach", "describe", "from_pretrained"]
