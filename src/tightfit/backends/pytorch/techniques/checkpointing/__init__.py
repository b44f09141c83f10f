"""Checkpointing: which activations are dropped in the forward pass and recomputed in the backward pass."""
