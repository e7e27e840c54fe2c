"""Text to tokens on disk (`store`), and tokens to batches (`loader`)."""
