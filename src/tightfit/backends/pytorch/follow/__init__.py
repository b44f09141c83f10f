"""Following what runs, on fake tensors or real ones: every op and what it costs, every storage and what it holds."""
