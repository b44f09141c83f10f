"""What the processor's kernels ask for besides their results."""
