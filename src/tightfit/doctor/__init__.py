"""Looking the machine over: what is there, what stops or slows training, and how fast the device really runs."""
