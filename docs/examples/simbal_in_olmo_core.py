"""Train a router of OLMo-core 3 with SimBal, which its option `orth_loss_weight` leaves to a subclass.

Copy the two functions and the assignment into your training script. Needs OLMo-core: `pip install ai2-olmo-core`.
Takes seconds on a CPU. Shapes: E experts, D model width.
"""

import torch
from olmo_core.nn.moe.v2.router import MoERouterV2

from simbal.balancing import SimBal
from simbal.metrics.similarity import mean_deviation


def router_rows(router: MoERouterV2) -> torch.Tensor:
    """Return the weight of a router, (E, D). OLMo-core stores it flat."""
    return router.weight.view(router.num_experts, router.d_model)


def orth_loss_weight(coef: float, rank_microbatch_size: int) -> float:
    """Return the `orth_loss_weight` that gives SimBal the coefficient `coef`.

    OLMo-core adds the loss in every micro-batch and divides it by the tokens that a rank trains on in a step, so a step
    adds the loss divided by `rank_microbatch_size`, the tokens of one micro-batch.
    """
    return coef * rank_microbatch_size


MoERouterV2.compute_orthogonal_loss = lambda router: SimBal(coef=1.0).of_weight(router_rows(router))

MICRO_BATCHES, TOKENS, STEPS = 2, 64, 100
torch.manual_seed(0)
router = MoERouterV2(d_model=64, num_experts=8, top_k=2, orth_loss_weight=orth_loss_weight(0.1, TOKENS))
optimizer = torch.optim.AdamW(router.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
print(f"mean |W W^T - I|: {mean_deviation(router_rows(router), torch.float32).item():.5f} at initialization,")
for _ in range(STEPS):
    for _ in range(MICRO_BATCHES):
        *_, routing = router(torch.randn(2, TOKENS // 2, 64), False, loss_div_factor=MICRO_BATCHES * TOKENS)
        router.compute_aux_loss(*routing).backward()  # in training, the transformer block does this
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
print(f"{mean_deviation(router_rows(router), torch.float32).item():.5f} after {STEPS} steps")
