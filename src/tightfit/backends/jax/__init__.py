"""The JAX backend: one file a technique, with the names of `tightfit.techniques`.

A model is functions over a flat dict of arrays, whose names are its checkpoint's; the arrays of the layers are stacked.
A build holds no array: `update.lower_step` compiles its step for a device that need not be present.
"""
