"""The step, or generation, traced on fake tensors for a device that need not be present."""
