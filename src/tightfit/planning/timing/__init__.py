"""Time model of a step: ops, host and device.

In reading order; the share of its peak that a card sustains is `Card.sustains` in `tightfit.catalogue`:

| file | what is in it |
|---|---|
| `step_time` | seconds of a step; the host's for issuing an op |
| `streams` | ops on their streams, simulated, with the queue of kernels ahead of the device |
| `op_times` | seconds of a kernel |
| `contractions` | matrix products by their tiles |
| `attention` | fused attention by its kernels |
| `rates` | what kernels of a kind sustain on a card |
| `link` | rates of copies between host and device, over PCIe |
| `copies` | time that copies add to a step |
| `network`, `communication` | collectives among several devices, and what they add to a step |
| `uncertainty` | how far predicted times are off |
"""
