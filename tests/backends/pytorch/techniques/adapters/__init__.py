"""Tests of adapters and of frozen weights."""
