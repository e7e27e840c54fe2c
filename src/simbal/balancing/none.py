"""No balancing: the control arm."""

from simbal.balancing.base import Balancing


class NoBalancing(Balancing):
    """loss = 0."""

    formula = "0"
    citation = "arXiv 2506.14038, figure 2"
