"""Plans of compiled modules, a caller's own among them: what no graph holds runs op by op, and is followed as anywhere.
"""

from __future__ import annotations

import pytest
from torch import nn

from tightfit import Recipe
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.search.evaluate import Evaluated, InProcess
from tightfit.planning.standard_tools import standard_tools
from tightfit.trace import FUSED_PREFIX, Phase

pytestmark = pytest.mark.usefixtures("few_objects")

WORDS, WIDTH = 300, 48
FIELDS = {
    "seq_len": 64, "batch_size": 16, "micro_batch_size": 16, "vocab_size": WORDS, "precision": "bf16", "loss": "plain",
    "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa", "data": {"packing": False},
}


class Breaking(nn.Module):
    """A block that reads a value, which the compiler cannot, between two of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(WIDTH, 4, 96, batch_first=True) for _ in range(2))

    def forward(self, hidden, **masks):
        hidden = self.first(hidden, **masks)
        return self.second(hidden * float(hidden.detach().sum()), **masks)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden)


@pytest.mark.parametrize("block", [
    pytest.param(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 96, batch_first=True), id="torch's own"),
    pytest.param(Breaking, id="with a graph break", marks=pytest.mark.cold),
])
def test_compiled_blocks_are_faster_take_no_more_and_nothing_of_ours_is_compiled(block, capfd):
    planned = InProcess(standard_tools(load_backend("pytorch"), module=Model(block)))
    eager, compiled = (
        planned.one(Recipe.from_dict({**FIELDS, "compile": way}), find_device("rtx-3090"))
        for way in ("off", "per-block")
    )
    assert isinstance(eager, Evaluated), eager
    assert isinstance(compiled, Evaluated), compiled
    assert "src/tightfit" not in capfd.readouterr().err  # nothing of ours that Dynamo has a word on
    assert compiled.events < eager.events
    assert 0.2 * eager.seconds < compiled.seconds < eager.seconds
    assert compiled.estimate.memory.peak_reserved < 1.1 * eager.estimate.memory.peak_reserved


@pytest.mark.parametrize("checkpointing", ["none", "every-block"])
def test_compiled_blocks_hold_flex_attention_as_they_hold_sdpa(checkpointing):
    tools = standard_tools(load_backend("pytorch"))
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 96, "vocab_size": WORDS}
    flex, sdpa = (
        tools.predict(Recipe.from_dict({**FIELDS, "model": "llama-3.2-1b", "model_overrides": small, "vocab_size": None,
                                        "checkpointing": checkpointing, "compile": "per-block", "attention": way,
                                        "data": {"source": "dummy"}}), find_device("rtx-3090"))
        for way in ("flex", "sdpa")
    )
    names = [[op.name for op, _ in trace.step_ops() if op.phase is not Phase.OPTIMIZER] for trace in (flex, sdpa)]
    assert names[0] == names[1]
    assert any(name.startswith(FUSED_PREFIX) for name in names[0])
