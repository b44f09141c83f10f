"""ZeRO by DeepSpeed: its engine, which owns clipping and the update, and what a checkpoint holds of it."""
