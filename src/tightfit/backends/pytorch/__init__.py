"""The PyTorch backend: at the top what training needs, and a package for each other room.

| package | contents |
|---|---|
| `techniques` | a file or a package for each slot of a recipe, with the names of `tightfit.techniques` |
| `follow` | following what runs, on fake tensors or real ones: ops and what they cost, memory and what it holds |
| `simulate` | the step, or generation, on fake tensors: kernels, autocast and scratch of a device that is not there |
| `measure` | a few real steps, measured; the calibration of this machine |
"""
