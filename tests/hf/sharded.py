"""Train a model for four steps on each rank with FSDP2: `python sharded.py FOLDER trainer|loop`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from simbal.balancing import ErnieOrthogonalLoss, LoadBalancingLoss, LossFree, SimBal
from simbal.distributed import full_tensor
from simbal.hf import attach
from simbal.hf.trainer import attach_trainer
from tests.hf.architectures import batch, host
from tests.hf.test_trainer import trainer_of

STEPS = 4


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in model.state_dict().items()}


def train_in_a_loop(model: nn.Module, rows: list[int]) -> dict[str, Tensor]:
    """Train on micro-batches of one row with losses, and with the model's own bias, a parameter in Ernie 4.5."""
    strategies = [SimBal(coef=0.5), LoadBalancingLoss(0.3, scope="micro"), LossFree(update_rate=0.05, bias_on="scores")]
    strategies.append(ErnieOrthogonalLoss(0.01, decoupled=True, scale_by_lr=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, strategies) as balancing:
        for step in range(STEPS):
            for row in rows:
                inputs = {key: value[row : row + 1] for key, value in batch(step, sequences=2).items()}
                ((model(**inputs).loss + balancing.loss()) / len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancing.step()
    return full_weights(model)


def use_fsdp_on_a_cpu() -> None:
    """Let accelerate shard on a CPU, which it does not offer: it reads these two entries of its shared state."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["MixtralDecoderLayer"]
    )
    AcceleratorState._shared_state |= {"fsdp_plugin": plugin, "distributed_type": DistributedType.FSDP}


def train_in_the_trainer(folder: Path) -> dict[str, Tensor]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    keys = {"gradient_accumulation_steps": 2 // ranks, "max_grad_norm": 0, "learning_rate": 1e-3}
    trainer = trainer_of(folder, max_steps=STEPS, ddp_backend="gloo" if ranks > 1 else None, **keys)
    if ranks > 1:
        use_fsdp_on_a_cpu()
        trainer.is_fsdp_enabled = True
    balancing = attach_trainer(trainer, [SimBal(coef=0.5), LoadBalancingLoss(0.3, scope="micro"), LossFree()])
    trainer.train()
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    assert is_sharded == (ranks > 1)
    return full_weights(trainer.model) | balancing.attachment.state_dict()["strategies"]


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "trainer":
        found = train_in_the_trainer(folder)
    else:
        dist.init_process_group("gloo")
        model = host("ernie4_5_moe")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        found = train_in_a_loop(model, [dist.get_rank()])
    if dist.get_rank() == 0:
        save_file(found, folder / "weights.safetensors")
