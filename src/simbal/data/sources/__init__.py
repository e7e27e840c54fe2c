"""Sources of text: one file for each `data.source`, and what they share."""
