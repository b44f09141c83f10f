"""Time model of a step: ops, host and device."""
