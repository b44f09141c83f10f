"""Measurements of this machine's speed: matrix products, attention, bandwidth, the host."""
