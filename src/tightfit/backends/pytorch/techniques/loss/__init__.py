"""Losses: of logits, and of hidden states with the output embedding."""
