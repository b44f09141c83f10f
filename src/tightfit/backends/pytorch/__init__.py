"""The PyTorch backend: one file a technique, with the names of `tightfit.techniques`."""
