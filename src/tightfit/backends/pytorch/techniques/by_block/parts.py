"""The parts of a model that learn one after the other: its blocks, the embeddings at its ends, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tightfit.backends.pytorch.padding import model_end
from tightfit.backends.pytorch.techniques.adapters.layers import FrozenLayer, quantized_parts

WITHOUT_BLOCKS = "accumulation=loop update=after-backward offload=none"
"""Settings that train a model whose blocks cannot run one after the other."""


class Parts:
    """Parts of a model by their numbers.

    blocks: the model's, each once; their numbers are those of their places here.
    modules: a module of each part: the blocks; the input embedding and the head, one part if they share a weight; and
        for the rest, the model.
    end_modules: all modules of an embedding's part.
    parameters: of each part, the learned ones that no other part has as well.
    frozen: whether what may wait in host memory as weights are those that no update changes, not the learned ones.
    weights: of each part, these tensors: its `parameters`, or what is frozen, and what holds quantized weights.
    embedding, head: numbers of these parts; None where the model names none, or nothing of them may wait.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], *, frozen: bool = False) -> None:
        self.frozen, self.blocks = frozen, blocks
        in_blocks = {parameter for block in self.blocks for parameter in block.parameters()}
        self.modules: list[nn.Module] = [*self.blocks]
        self._own = [[t for t in own if frozen or t.requires_grad] for own in _own_tensors(model, self.blocks)]
        self.embedding = self._add_end(model_end(model, "get_input_embeddings"), in_blocks)
        self.head = self._add_end(model_end(model, "get_output_embeddings"), in_blocks)
        inside = {tensor for own in self._own for tensor in own}
        # An encoder and a decoder may have modules of their own for one embedding.
        self.end_modules = {
            number: [m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear)
                     and not {*self._own[number]}.isdisjoint(m.parameters(recurse=False))]
            for number in self.behind_blocks
        }  # fmt: skip
        self._own.append([p for p in model.parameters() if p.requires_grad and p not in inside])
        self.modules.append(model)
        self.parameters = [[t for t in own if isinstance(t, nn.Parameter) and t.requires_grad] for own in self._own]
        self.weights = [[t for t in own if t.requires_grad is not frozen] for own in self._own]

    @property
    def behind_blocks(self) -> range:
        """Numbers of the embeddings' parts and of the rest."""
        return range(len(self.blocks), len(self.modules))

    def next_block(self, block: int) -> int | None:
        """The number of the block behind one; None behind the last."""
        return block + 1 if block + 1 < len(self.blocks) else None

    def first(self, share: float, *, embeddings: bool) -> frozenset[int]:
        """A share of the blocks: the first ones, whose gradients come last. embeddings: their parts as well."""
        return frozenset((*range(round(share * len(self.blocks))), *(self.end_modules if embeddings else ())))

    def _add_end(self, module: object, in_blocks: set[nn.Parameter]) -> int | None:
        if not isinstance(module, nn.Embedding | nn.Linear):
            return None
        own = [p for p in module.parameters() if self.frozen or p.requires_grad]
        if not own or in_blocks.intersection(module.parameters()):
            return None
        for number in self.behind_blocks:
            known = self._own[number]
            if not {*known}.isdisjoint(own):  # tied
                known += [p for p in own if p not in {*known}]
                return number
        self.modules.append(module)
        self._own.append([*own])
        return len(self.modules) - 1


def _own_tensors(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Tensor]]:
    """Each block's parameters, and what holds its quantized weights, that no other part of the model has as well."""
    inside: dict[nn.Module, set[nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            inside.setdefault(module, set()).add(block)
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        held = quantized_parts(module) if isinstance(module, FrozenLayer) else []
        for tensor in (*module.parameters(recurse=False), *held):
            owners.setdefault(tensor, set()).update(inside.get(module, {model}))
    found: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}
    for tensor, parts in owners.items():
        for block in parts if len(parts) == 1 else ():
            if block in found:
                found[block].append(tensor)
    return [*found.values()]
