"""A few real steps, measured: wall seconds, every op, every allocation."""
