"""From a config to a finished run folder."""
