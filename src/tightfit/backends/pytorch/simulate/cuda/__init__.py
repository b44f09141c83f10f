"""What a CUDA device would do where the processor runs the fake tensors: kernels, autocast, scratch."""
