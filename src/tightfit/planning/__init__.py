"""Choosing what a recipe leaves open."""
