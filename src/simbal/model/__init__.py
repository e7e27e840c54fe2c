"""The paper's Transformer: it does not know who balances it."""
