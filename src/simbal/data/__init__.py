"""Data: sources of text, the tokenizer, tokens on disk, and batches."""
