"""What torch.compile would make of a step: AOTAutograd's graphs, Inductor's kernels and memory."""
