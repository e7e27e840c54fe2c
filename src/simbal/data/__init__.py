"""The data of a run: from text to tokens on disk (`store`), and from tokens to batches (`loader`)."""
