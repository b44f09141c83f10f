"""Decoders see no token that they predict, whatever their attention modules say of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.architectures import SEQ2SEQ
from tests.backends.pytorch.techniques.attention.attention_cases import batch_of, built, make
from tightfit.backends.pytorch.techniques.attention import functions
from tightfit.errors import ModelError
from tightfit.techniques.attention import Attention, Eager, Flex, Sdpa

NAMES = (*SEQ2SEQ, "umt5", "t5gemma")
CASES = [(name, technique, kind) for name in NAMES for technique in (Eager(), Sdpa()) for kind in ("none", "padded")]


@pytest.mark.parametrize(
    ("name", "technique", "kind"), [*CASES, ("bart", Flex(), "none")], ids=lambda value: getattr(value, "name", value)
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_last_decoder_token_moves_its_own_logits_alone(
    name: str, technique: Attention, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_compiled", lambda function: function)
    build = built(make(name), technique, "seq2seq")
    batch = batch_of(kind, "seq2seq")
    changed = batch.inputs["decoder_input_ids"].clone()
    changed[:, -1] = 3
    other = replace(batch, inputs={**batch.inputs, "decoder_input_ids": changed})
    with torch.no_grad():
        moved = (build.logits(batch) - build.logits(other)).abs().amax(-1)
    assert moved[:, :-1].max() == 0.0
    assert moved[:, -1].min() > 1e-6


@pytest.mark.parametrize("technique", [Eager(), Sdpa()])
def test_a_decoder_is_causal_in_a_loop_that_is_not_ours(technique: Attention) -> None:
    model = built(make("umt5"), technique, "seq2seq").model
    inputs = batch_of("none", "seq2seq").inputs
    with torch.no_grad():
        apart = model(**inputs).logits - make("umt5", "eager")(**inputs).logits
    assert apart.abs().max() < 1e-10


def test_flex_refuses_what_umt5_adds_to_its_scores() -> None:
    with pytest.raises(ModelError, match="position_bias"):
        built(make("umt5"), Flex(), "seq2seq").logits(batch_of("none", "seq2seq"))
