"""Training, from a config to a finished run folder."""

import gc

# What Lightning and torch make while they are imported stays: looking for garbage among it would cost two thirds of
# that time again, half of it at the end of the process; and a fork that looks would copy every page of its server.
enabled = gc.isenabled()
gc.disable()
import lightning  # noqa: E402, F401

gc.freeze()
if enabled:
    gc.enable()
