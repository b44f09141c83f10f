"""CUDA's autocast, SDPA kernels and scratch memory, for fake tensors on the CPU."""
