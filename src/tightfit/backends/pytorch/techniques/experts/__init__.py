"""Mixtures of experts: which function computes them, and the losses of their routers."""
