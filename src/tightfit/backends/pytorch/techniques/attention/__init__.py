"""Attention kernels: functions registered with transformers, what a call passes them, and the masks they take."""
