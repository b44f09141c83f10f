"""The CPU's kernels: memory that they use besides their results, and where their shapes differ from fake tensors'."""
