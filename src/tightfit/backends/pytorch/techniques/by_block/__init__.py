"""Work block by block: the order of passes, updates beside them, and what lives in host memory meanwhile.

In reading order:

| file | what is in it |
|---|---|
| `sweep` | gradient accumulation block by block; start here |
| `suspended_pass` | a forward pass in a coroutine, suspended where the model calls a block |
| `block_calls` | modules wrapped so that their calls are seen |
| `update` | the optimizer step of a block: in the backward pass, behind it, or with the next forward pass |
| `offloaded_state` | which parts' weights, gradients and optimizer states live in host memory |
| `streamed_tensors` | tensors of one kind there, double-buffered on the GPU |
| `transfers` | copies between host and GPU, on streams of their own |
| `host_allocator` | page-locked host memory |
| `activations` | tensors kept for the backward pass, in host memory |
| `parts` | blocks and embeddings of a model, and their parameters |
| `state_dicts` | state dicts of a model whose weights live in host memory |

From a step to a copy: `Step.accumulate` calls `sweep.ByBlock`, which has a block made ready (`BlockCalls.begin`)
before its micro-batches go through; `UpdateByBlock.make_ready` brings its weights (`OffloadedState`,
`StreamedTensors.fetch`, `Transfers.to_device`) and applies the update that it still waits for.
"""
