"""Inputs that no one would write, drawn from seeds, and what has to come of each: a module a kind."""
