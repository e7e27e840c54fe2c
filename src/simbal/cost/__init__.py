"""The cost of a model, without making it: parameters, FLOPs and memory."""
