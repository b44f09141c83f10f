"""The losses of routers: as computed by hand, the same however a global batch is split, and never twice."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.architectures import tiny_model
from tests.backends.pytorch.experts.experts_cases import (
    COEFFICIENTS,
    CONFIGS,
    SINGLES,
    THIRDS,
    WHOLE,
    gradients,
    losses_by_hand,
    moe_model,
    moe_step,
    packed,
    ragged,
)
from tests.backends.pytorch.techniques.by_block.streaming_cases import ALL, HOST
from tests.plain import CPU
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.experts.routing import coefficient, find_routers
from tightfit.backends.pytorch.saved_model import save_model
from tightfit.errors import Refused

BY_BLOCK = {"accumulation": "by-block"}
COMPILED = {"compile": {"name": "per-block", "backend": "aot_eager"}}
ONE_SHAPE = 131
"""Seed of rows that two and two are padded to one length: what is compiled for the first pair serves the others."""
RECOMPUTED = ("none", "every-block", "mlp", "selective")


def assert_alike(found, wanted, within=3e-5):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= within * gradient.abs().max(), name


@pytest.mark.parametrize("checkpointing", RECOMPUTED)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_and_figures_are_those_computed_by_hand(name, checkpointing):
    model, batch = moe_model(name), ragged(WHOLE)
    by_hand = copy.deepcopy(model)
    cross_entropy, balance, z = losses_by_hand(by_hand, batch.micro_batches[0], 2)
    aux, small = COEFFICIENTS.values()
    (cross_entropy + aux * balance + small * z).backward()

    found, result = gradients(moe_step(name, model, checkpointing=checkpointing), batch)

    assert_alike(found, {n: p.grad for n, p in by_hand.named_parameters()})
    assert result.metrics["balance_loss"].mean == pytest.approx(balance.item(), rel=1e-5)
    assert result.metrics["router_z_loss"].mean == pytest.approx(z.item(), rel=1e-5)
    assert result.metrics["balance_loss"].adds_up


@pytest.mark.parametrize("checkpointing", RECOMPUTED)
@pytest.mark.parametrize("name", ["olmoe", "every other layer"])
def test_a_global_batch_may_be_split_in_any_way_block_by_block(name, checkpointing):
    wanted, whole = gradients(moe_step(name, checkpointing=checkpointing), ragged(WHOLE))
    for split in (WHOLE, THIRDS, SINGLES):
        found, result = gradients(moe_step(name, checkpointing=checkpointing, **BY_BLOCK), ragged(split))
        assert_alike(found, wanted)
        for metric, total in whole.metrics.items():
            assert result.metrics[metric].mean == pytest.approx(total.mean, rel=1e-5)
            assert result.metrics[metric].adds_up == total.adds_up


@pytest.mark.parametrize("fields", [{}, {"accumulation": {"name": "by-block", "sweep": 2}}], ids=str)
def test_a_loop_takes_each_micro_batchs_own_choices_and_says_so(fields):
    found, split = gradients(moe_step("olmoe", **fields), ragged(THIRDS))
    exact, whole = gradients(moe_step("olmoe"), ragged(WHOLE))

    assert not split.metrics["balance_loss"].adds_up
    assert split.metrics["balance_loss"].mean > whole.metrics["balance_loss"].mean  # few tokens never spread evenly
    for name in ("router_z_loss", "expert_load"):
        assert split.metrics[name].mean == pytest.approx(whole.metrics[name].mean, rel=1e-5)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(found[router], exact[router], rtol=1e-3)


@pytest.mark.parametrize(("fields", "split"), [
    pytest.param({"checkpointing": "every-block"}, WHOLE, marks=pytest.mark.cold), (BY_BLOCK, THIRDS)], ids=str)
def test_compiled_blocks_have_the_same_losses(fields, split):
    fields, name = {**fields, "precision": "bf16"}, "every other layer"
    plain_model, model = (moe_model(name, num_hidden_layers=2) for _ in range(2))
    wanted, plain = gradients(moe_step(name, plain_model, **fields), ragged(split, ONE_SHAPE))
    step = moe_step(name, model, **fields, **COMPILED)
    found, result = gradients(step, ragged(split, ONE_SHAPE))
    assert_alike(found, wanted, within=2e-2)
    for metric, total in plain.metrics.items():
        assert result.metrics[metric].mean == pytest.approx(total.mean, rel=1e-3)
    assert not any("grouped products" in note for note in step.build.notes)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_the_compiler_has_no_grouped_product_for_is_said(precision):
    notes = moe_step("olmoe", precision=precision, **COMPILED).build.notes
    assert any("torch compiles grouped products in bf16 alone" in note for note in notes)


@pytest.mark.parametrize("fields", [HOST, ALL], ids=["weights", "activations too"])
def test_experts_whose_blocks_wait_in_host_memory(fields):
    wanted, plain = gradients(moe_step("gpt-oss"), ragged(WHOLE))
    found, result = gradients(moe_step("gpt-oss", **{**fields, **BY_BLOCK}), ragged(THIRDS))
    assert_alike(found, wanted)
    assert result.metrics["balance_loss"].mean == pytest.approx(plain.metrics["balance_loss"].mean, rel=1e-5)


def test_padding_is_not_counted():
    """Rows alone, without padding, and beside longer ones: the same tokens."""
    for split in (WHOLE, SINGLES):
        step = moe_step("olmoe", **BY_BLOCK)
        step.accumulate(ragged(split))
        assert step.routing.counts().sum(-1).tolist() == [2.0 * ragged(split).tokens] * 4
    (whole,) = ragged(WHOLE).micro_batches
    assert whole.labels.numel() > ragged(WHOLE).tokens


@pytest.mark.parametrize("fields", [{}, BY_BLOCK, {"attention": "sdpa"}], ids=str)
@pytest.mark.parametrize("name", ["olmoe", "shared expert"])
def test_documents_that_share_a_row_are_routed_as_in_rows_of_their_own(name, fields):
    wanted, apart = gradients(moe_step(name), ragged(WHOLE))
    found, together = gradients(moe_step(name, **fields), packed())
    assert_alike(found, wanted)
    for metric, total in apart.metrics.items():
        assert together.metrics[metric].mean == pytest.approx(total.mean, rel=1e-5)


def test_the_models_own_balance_loss_is_not_made_beside_ours(tmp_path):
    once, twice = (moe_step("olmoe", moe_model("olmoe", output_router_logits=on)) for on in (False, True))

    assert_alike(gradients(twice, ragged(WHOLE))[0], gradients(once, ragged(WHOLE))[0])
    assert twice.build.model.config.output_router_logits is False
    for step, on in ((once, False), (twice, True)):  # a saved model's is what was loaded
        save_model(step.build.model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()).get("output_router_logits", False) is on
    assert twice.build.model.config.output_router_logits is False


def test_fp16_scales_the_routers_gradients_as_the_losss():
    plain, _ = gradients(moe_step("olmoe", router_aux_loss_coef=3.0), ragged(WHOLE))
    scaled, result = gradients(moe_step("olmoe", precision="fp16", router_aux_loss_coef=3.0), ragged(WHOLE))
    router = "model.layers.3.mlp.gate.weight"

    assert not result.skipped
    assert_alike({router: scaled[router]}, {router: plain[router]}, within=0.1)


def test_coefficients_are_the_configurations_where_a_recipe_names_none():
    step = moe_step("olmoe", moe_model("olmoe", router_aux_loss_coef=0.02), router_aux_loss_coef=None,
                    router_z_loss_coef=None)

    assert (step.routing.balance_coefficient, step.routing.z_coefficient) == (0.02, 0.0)
    assert coefficient(step.build, "router_aux_loss_coef") == 0.02


def test_a_balance_loss_that_transformers_would_not_add_is_said():
    def told(model, **fields):
        build = moe_step("olmoe", model, **{"router_aux_loss_coef": None, **fields}).build
        again = bare_build(build.recipe, CPU, torch.device("cpu"), model)
        assert [*filter(said, again.notes)] == [*filter(said, build.notes)]  # a first run has switched it off
        return [*filter(said, build.notes)]

    def said(note):
        return note.startswith("router_aux_loss_coef")

    (note,) = told(moe_model("olmoe", router_aux_loss_coef=0.02))
    assert "configuration's 0.02" in note
    assert note.endswith("write router_aux_loss_coef=0 to leave it out, as the Hugging Face Trainer does")
    assert told(moe_model("olmoe", output_router_logits=True)) == []
    assert told(moe_model("olmoe", router_aux_loss_coef=0.0)) == []
    assert told(moe_model("olmoe"), router_aux_loss_coef=0) == told(moe_model("olmoe"), router_aux_loss_coef=1) == []


def test_no_coefficient_adds_nothing():
    model, by_hand = moe_model("olmoe"), moe_model("olmoe")
    losses_by_hand(by_hand, ragged(WHOLE).micro_batches[0], 2)[0].backward()
    step = moe_step("olmoe", model, router_aux_loss_coef=0, router_z_loss_coef=0)

    assert_alike(gradients(step, ragged(WHOLE))[0], {n: p.grad for n, p in by_hand.named_parameters()})


def test_a_model_without_routers_refuses_their_losses():
    with pytest.raises(Refused, match=r"router_aux_loss_coef: the routers of GPT2LMHeadModel are not known"):
        moe_step("olmoe", tiny_model("gpt2"), router_z_loss_coef=None)


def test_evaluation_counts_nothing_and_close_takes_hooks_away():
    step = moe_step("olmoe")
    step.accumulate(ragged(THIRDS))
    before = step.routing.counts().clone()
    step.evaluate([ragged(THIRDS)])
    assert torch.equal(step.routing.counts(), before)

    step.close()
    assert all(not router.module._forward_hooks for router in find_routers(step.build.model))


def test_a_linear_router_whose_scores_are_made_elsewhere():
    numbers = {"num_experts": 4, "attn_layer_period": 1, "attn_layer_offset": 0, "use_mamba_kernels": False}
    model, batch = moe_model(("JambaConfig", numbers)), ragged(WHOLE)
    by_hand = copy.deepcopy(model)
    cross_entropy, balance, z = losses_by_hand(by_hand, batch.micro_batches[0], 2)
    aux, small = COEFFICIENTS.values()
    (cross_entropy + aux * balance + small * z).backward()

    assert_alike(gradients(moe_step("", model), batch)[0], {n: p.grad for n, p in by_hand.named_parameters()})


def test_a_router_that_is_a_linear_layer_itself_and_draws():
    model = moe_model(("PhimoeConfig", {"num_local_experts": 4}))
    assert [(router.logits_index, router.experts, router.chosen) for router in find_routers(model)] == [(0, 4, 2)] * 4
    assert gradients(moe_step("", model), ragged(WHOLE))[1].metrics["balance_loss"].mean > 0.9


def test_figures_that_are_read_when_the_next_step_has_begun_are_of_their_own():
    """As on a GPU, where nobody waits for them."""
    step = moe_step("olmoe")
    first = step(ragged(WHOLE), 0.0)
    known = first.read().metrics
    step(ragged(THIRDS), 0.0)
    step.routing.tokens += 1
    assert first.read().metrics == known
    assert known["balance_loss"].adds_up
