"""Another library's MoE, seen from its routers: what they decide, and how to change it."""
