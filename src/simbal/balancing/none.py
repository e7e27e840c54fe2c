"""No balancing: the control arm."""

from simbal.balancing.base import Balancing, Properties


class NoBalancing(Balancing):
    """No balancing: loss = 0."""

    formula = "no loss"
    citation = "arXiv 2506.14038, figure 2"
    properties = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)
