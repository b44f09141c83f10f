"""A compiled step as XLA describes it: its program, its kernels, and the memory that it planned."""
