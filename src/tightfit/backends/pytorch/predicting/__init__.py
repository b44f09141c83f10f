"""Reading the training step, or generation, on fake tensors, for a device that need not be there."""
