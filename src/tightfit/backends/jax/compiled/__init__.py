"""A compiled step as XLA describes it: for a GPU that need not be present, or as it ran, with its program, its
kernels, and the memory that it planned."""
