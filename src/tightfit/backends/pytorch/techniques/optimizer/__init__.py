"""Optimizers: those of torch and torchao, AnyPrecision AdamW, and the state of any."""
