"""Choosing: which combinations are weighed, what is known of each, and what a person is told."""
