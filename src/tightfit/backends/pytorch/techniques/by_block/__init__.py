"""Work block by block: what waits in host memory, in which order micro-batches go, when weights are updated."""
