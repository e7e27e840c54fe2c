"""The LightningModule: one step from tokens to the loss and back to the balancing strategy.

Shapes: B sequences, S sequence length, T = S + 1, N = B*S tokens, V vocabulary, L MoE layers, E experts.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from simbal.balancing.composition import Composition
from simbal.model.head import HeadLoss, head_loss
from simbal.model.router import Routing
from simbal.model.transformer import Transformer
from simbal.training.optim import OptimSettings, build_optimizer
from simbal.training.validation import Validation, ValidationTotals


class LitMoE(L.LightningModule):
    """loss = cross-entropy + z-loss + sum over strategies and layers of the auxiliary losses."""

    def __init__(
        self,
        model: Transformer,
        balancing: Composition,
        optim: OptimSettings,
        max_steps: int,
        z_loss_coef: float,
        grad_clip: float,
        aux_layer_reduce: str,
        bytes_of_token_V: Tensor,
    ) -> None:
        """`grad_clip` 0: the norm is measured but not clipped; `aux_layer_reduce`: sum or mean over layers."""
        super().__init__()
        self.model, self.balancing, self.optim = model, balancing, optim
        self.max_steps, self.z_loss_coef, self.grad_clip = max_steps, z_loss_coef, grad_clip
        self.aux_layer_reduce = aux_layer_reduce
        self.bytes_of_token_V = nn.Buffer(bytes_of_token_V, persistent=False)
        num_routers, num_experts = len(model.routers), model.shape.num_experts
        # counts of the optimizer step in progress, over its micro-batches
        self.step_counts_LE = nn.Buffer(torch.zeros(num_routers, num_experts).long(), persistent=False)
        self.finished_counts_LE = torch.zeros_like(self.step_counts_LE)  # of the last whole step
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.validation: Validation | None = None

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[HeadLoss, list[Routing]]:
        """Loss of the language model alone, and every layer's routing."""
        hidden_BSD, routings = self.model(tokens_BS, self.balancing.expert_bias())
        loss = head_loss(hidden_BSD.flatten(0, 1), self.model.head_VD, targets_BS.flatten(), self.z_loss_coef)
        return loss, routings

    def training_step(self, window_BT: Tensor, batch_idx: int) -> dict[str, Any]:
        """`window_BT` holds the inputs and, shifted by one, the targets."""
        head, routings = self(window_BT[:, :-1], window_BT[:, 1:])
        reduce = torch.sum if self.aux_layer_reduce == "sum" else torch.mean
        aux = {name: reduce(loss_L) for name, loss_L in self.balancing.losses(routings).items()}
        loss = torch.stack([head.loss, *aux.values()]).sum()
        if routings:
            self.step_counts_LE.add_(torch.stack([routing.tokens_per_expert_E for routing in routings]))
        return {"loss": loss, "total": loss.detach(), "ce": head.nll_N.mean(), "aux": aux}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """After the optimizer, and once for all its micro-batches, the strategies see where the tokens went."""
        super().optimizer_step(*args, **kwargs)
        self.finished_counts_LE = self.step_counts_LE.clone()
        self.balancing.update(self.finished_counts_LE)
        self.step_counts_LE.zero_()

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the norm of the whole gradient, and keep what it was before."""
        largest = self.grad_clip or float("inf")
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters(), largest)

    def configure_optimizers(self) -> Any:
        """The schedule moves once per optimizer step."""
        optimizer, scheduler = build_optimizer(self.model, self.optim, self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Every validation starts from nothing."""
        self.totals = ValidationTotals()

    def validation_step(self, window_BT: Tensor, batch_idx: int) -> None:
        """`window_BT` as in training."""
        targets_BS = window_BT[:, 1:]
        head, routings = self(window_BT[:, :-1], targets_BS)
        self.totals.add(head.nll_N, self.bytes_of_token_V[targets_BS.flatten()], routings)

    def on_validation_epoch_end(self) -> None:
        """`self.validation` holds the newest numbers."""
        self.validation = self.totals.summary([router.weight_ED for router in self.model.routers])
