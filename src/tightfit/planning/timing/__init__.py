"""How long a step takes: ops, host and device."""
