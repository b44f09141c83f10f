"""The PyTorch backend: one file a technique, with the names of `tightfit.techniques`, and a package for each room.

| package | what is in it |
|---|---|
| `predicting` | the step, or generation, on fake tensors, as on a device that need not be there |
| `tracing` | following what runs, on fake tensors or real ones: ops and what they cost, memory and what it holds |
| `cuda_target`, `cpu_target` | what kernels of either device do that fake tensors do not tell |
| `compiled` | what torch.compile would make of a step |
| `measuring` | a few real steps, measured |
| `ceilings` | how fast this machine really is |
"""
