"""The parts of a model that learn one after the other: its blocks, the embeddings at its ends, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tightfit.backends.pytorch.padding import model_end


class Parts:
    """Parts of a model by their numbers.

    blocks: the model's, each once; their numbers are those of their places here.
    modules: a module of each part: the blocks; the input embedding and the head, one part if they share a weight; and
        for the rest, the model.
    end_modules: all modules of an embedding's part.
    parameters: of each part, the learned ones that no other part has as well.
    embedding, head: numbers of these parts; None where the model names none.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Sequence[nn.Module]]) -> None:
        self.blocks = tuple(dict.fromkeys(block for stack in stacks for block in stack))
        in_blocks = {parameter for block in self.blocks for parameter in block.parameters()}
        self.modules: list[nn.Module] = [*self.blocks]
        self.parameters = _own_parameters(model, self.blocks)
        self.embedding = self._add_end(model_end(model, "get_input_embeddings"), in_blocks)
        self.head = self._add_end(model_end(model, "get_output_embeddings"), in_blocks)
        inside = {p for parameters in self.parameters for p in parameters}
        # An encoder and a decoder may have modules of their own for one embedding.
        self.end_modules = {
            number: [m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear)
                     and not {*self.parameters[number]}.isdisjoint(m.parameters(recurse=False))]
            for number in self.behind_blocks
        }  # fmt: skip
        self.parameters.append([p for p in model.parameters() if p.requires_grad and p not in inside])
        self.modules.append(model)

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
        learned = [p for p in module.parameters() if p.requires_grad]
        if not learned or in_blocks.intersection(module.parameters()):
            return None
        for number in self.behind_blocks:
            known = self.parameters[number]
            if not {*known}.isdisjoint(learned):  # tied
                known += [p for p in learned if p not in {*known}]
                return number
        self.modules.append(module)
        self.parameters.append(learned)
        return len(self.modules) - 1


def _own_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Each block's learned parameters that no other part of the model has as well."""
    inside: dict[nn.Module, set[nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            inside.setdefault(module, set()).add(block)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).update(inside.get(module, {model}))
    return [[p for p in block.parameters() if p.requires_grad and owners[p] == {block}] for block in blocks]
