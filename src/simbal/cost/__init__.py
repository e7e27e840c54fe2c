"""The cost of a model, without making it: parameters, FLOPs, memory, and the rates of devices."""
