"""What the compiling process leaves for the one that started it."""

from __future__ import annotations

TRACE = "trace.json.gz"
FAILURE = "failure.json"
"""The kind and the text of an error that a person can act on."""
