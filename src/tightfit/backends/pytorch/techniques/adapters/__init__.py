"""Adapters and frozen weights: LoRA and DoRA factors, quantized layers, the adapter's folder."""
