"""The CUDA caching allocator, simulated, and what is replayed through it."""
