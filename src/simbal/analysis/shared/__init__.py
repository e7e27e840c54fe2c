"""Parts that several analyses share: the run that they read back, and the form of what they find."""
