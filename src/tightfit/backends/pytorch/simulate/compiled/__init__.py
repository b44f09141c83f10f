"""torch.compile on fake tensors: AOTAutograd's graphs, Inductor's kernels and memory."""
