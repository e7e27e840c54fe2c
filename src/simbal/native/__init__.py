"""Kernels for a CPU in C, compiled on first use with the machine's C compiler."""
