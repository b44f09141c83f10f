"""Optimizers: those of torch and torchao, two of our own, and the state of any."""
