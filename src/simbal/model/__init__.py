"""The paper's Transformer. It does not depend on balancing strategies."""
