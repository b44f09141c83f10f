from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.allocations import allocated
from tests.backends.pytorch.techniques.optimizer.optimizer_cases import NEEDS_COMPILER
from tightfit.backends.pytorch.techniques.optimizer import anyprecision
from tightfit.backends.pytorch.techniques.optimizer.anyprecision import AnyPrecisionAdamW
from tightfit.backends.pytorch.techniques.optimizer.compiled_update import Update, scalars, update
from tightfit.errors import ModelError

FP32_STATES = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}
SHAPES = ((40, 30), (7,), (), (5, 3, 2))


def weights(dtype: torch.dtype = torch.float32, shapes: tuple = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [(torch.randn(shape, generator=generator) + 2).to(torch.bfloat16) for shape in shapes]
    return [nn.Parameter(value.to(dtype)) for value in values]


def run(
    optimizer: Optimizer, parameters: list[nn.Parameter], steps: int, scale: Callable[[int], float] = lambda t: 1.0
) -> None:
    """Steps with gradients that do not depend on the weights, so that trajectories can be compared."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for parameter in parameters:
            gradient = (torch.randn(parameter.shape, generator=generator) + 0.5) * scale(step)
            parameter.grad = gradient.to(torch.bfloat16).to(parameter.dtype)
        optimizer.step()


def distance(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    return max((x.detach().double() - y.detach().double()).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_adamw_in_full_precision(dtype: torch.dtype) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    states = {"momentum_dtype": dtype, "variance_dtype": dtype}
    run(AnyPrecisionAdamW(ours, lr=1e-2, weight_decay=0.1, **states), ours, 50)
    run(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1), theirs, 50)
    assert distance(ours, theirs) <= 10 * torch.finfo(dtype).eps
    assert distance(ours, weights(dtype)) > 0.1


def test_bf16_states_stay_near_adamw() -> None:
    ours, theirs = weights(), weights()
    run(AnyPrecisionAdamW(ours, lr=1e-3), ours, 300)
    run(torch.optim.AdamW(theirs, lr=1e-3), theirs, 300)
    assert distance(ours, theirs) < 0.02 * distance(theirs, weights())


def test_kahan_tracks_fp32_weights_far_closer_than_nearest() -> None:
    true, errors = weights(), {}
    run(torch.optim.AdamW(true, lr=1e-4, weight_decay=0.1), true, 300)
    for rounding in ("kahan", "nearest"):
        ours = weights(torch.bfloat16)
        optimizer = AnyPrecisionAdamW(ours, lr=1e-4, weight_decay=0.1, rounding=rounding, **FP32_STATES)
        run(optimizer, ours, 300)
        carried = [optimizer.state[p].get("compensation", torch.zeros(())) for p in ours]
        sums = [nn.Parameter(p.detach().float() + c.float()) for p, c in zip(ours, carried, strict=True)]
        errors[rounding] = distance(sums, true)
    assert errors["kahan"] < 0.03 * errors["nearest"]


def test_kahan_moves_by_updates_below_the_last_bit_of_the_compensation_too() -> None:
    """Steps of 1e-5 on a weight of 3, whose last bit is 1.6e-2: bf16(c + u), to the nearest, stops at c = 4e-3."""
    weight = nn.Parameter(torch.full((8,), 3.0, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([weight], lr=1e-5, weight_decay=0.0, rounding="kahan")
    for _ in range(3000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    end = weight.detach().float() + optimizer.state[weight]["compensation"].float()
    torch.testing.assert_close(end, torch.full((8,), 3.0 - 3000e-5), rtol=0, atol=1e-3)


def test_stochastic_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    true, ours = weights(shapes=((100, 100),)), weights(torch.bfloat16, ((100, 100),))
    run(torch.optim.AdamW(true, lr=1e-4), true, 50)
    run(AnyPrecisionAdamW(ours, lr=1e-4, rounding="stochastic", **FP32_STATES), ours, 50)
    drift = (true[0] - weights(shapes=((100, 100),))[0]).mean().item()
    assert (ours[0].float() - true[0]).mean().item() == pytest.approx(0, abs=0.1 * abs(drift))
    assert (ours[0].float() - true[0]).abs().max() < 0.1


def test_bf16_variance_falls_with_the_gradients() -> None:
    """Rounded to the nearest it would stay where the large gradients left it, four times too high in the root."""
    parameters = weights(shapes=((50, 40),))
    exact = weights(shapes=((50, 40),))
    ours = AnyPrecisionAdamW(parameters, lr=1e-3)
    theirs = AnyPrecisionAdamW(exact, lr=1e-3, **FP32_STATES)
    for optimizer, each in ((ours, parameters), (theirs, exact)):
        run(optimizer, each, 2500, lambda step: 1.0 if step < 500 else 0.1)
    assert ours.state[parameters[0]]["variance"].dtype is torch.bfloat16
    ratio = (ours.state[parameters[0]]["variance"].float() / theirs.state[exact[0]]["variance"]).sqrt()
    assert ratio.mean().item() == pytest.approx(1, abs=0.02)
    assert (ratio - 1).abs().max() < 0.15


@pytest.mark.parametrize("rounding", ["kahan", "nearest"])
def test_chunks_change_nothing(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for chunk in (1 << 20, 100, 7):
        monkeypatch.setattr(anyprecision, "CHUNK", chunk)
        mixed = weights(torch.bfloat16) + weights(torch.float32)
        mixed[0].data = mixed[0].data.t().contiguous().t()
        run(AnyPrecisionAdamW(mixed, lr=1e-2, rounding=rounding), mixed, 5)
        ends.append(mixed)
    assert distance(ends[0], ends[1]) == 0
    assert distance(ends[0], ends[2]) == 0


def test_temporaries_are_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anyprecision, "CHUNK", 1 << 14)
    parameters = weights(torch.bfloat16, ((512, 512), (512, 512)))
    optimizer = AnyPrecisionAdamW(parameters, lr=1e-2, rounding="kahan")
    run(optimizer, parameters, 1)
    assert 0 < max(allocated(optimizer.step)) <= 6 * 4 * (1 << 14)


def test_parameters_without_gradients_are_left_alone() -> None:
    first, second = weights(shapes=((3,), (4,)))
    optimizer = AnyPrecisionAdamW([first, second], lr=1e-2)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert set(optimizer.state) == {first}


def test_gradients_are_not_changed() -> None:
    parameters = weights(torch.bfloat16) + weights()
    run(optimizer := AnyPrecisionAdamW(parameters, lr=1e-2, rounding="kahan"), parameters, 1)
    before: list[Tensor] = [p.grad.clone() for p in parameters if p.grad is not None]
    optimizer.step()
    assert all(torch.equal(b, p.grad) for b, p in zip(before, parameters, strict=True) if p.grad is not None)


def test_a_closure_is_called_with_gradients_on() -> None:
    (parameter,) = weights(shapes=((3,),))
    optimizer = AnyPrecisionAdamW([parameter], lr=1e-2)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert parameter in optimizer.state


def test_half_precision_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="float16"):
        AnyPrecisionAdamW(weights(torch.float16), lr=1e-2)


ROUNDINGS, STEPS = ("kahan", "stochastic", "nearest"), 8


def moved(
    update: Update | None, dtype: torch.dtype, states: dict[str, torch.dtype], rounding: str
) -> dict[str, Tensor]:
    """Weights and states after a few steps, by parameter and name."""
    parameters = weights(dtype, SHAPES[:2])
    optimizer = AnyPrecisionAdamW(parameters, lr=1e-2, weight_decay=0.1, rounding=rounding, update=update, **states)
    run(optimizer, parameters, STEPS)
    found = {f"{n}": parameter.detach() for n, parameter in enumerate(parameters)}
    return found | {f"{n} {name}": value for n, parameter in enumerate(parameters)
                    for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("states", [{}, FP32_STATES], ids=["bf16 states", "fp32 states"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_function_updates_a_parameter_as_lists_of_them_are(
    dtype: torch.dtype, states: dict[str, torch.dtype], rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anyprecision, "COMPILED_VALUES", 8)
    by_lists, alone = (moved(how, dtype, states, rounding) for how in (None, update))
    assert by_lists.keys() == alone.keys()
    for name, value in by_lists.items():
        most = torch.finfo(value.dtype).eps * (STEPS if rounding == "stochastic" and dtype is torch.bfloat16 else 2)
        torch.testing.assert_close(alone[name], value, rtol=most, atol=1e-2 if "compensation" in name else 1e-6)


@NEEDS_COMPILER
def test_compiled_it_rounds_as_it_does_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes a cast to bf16 and back for none leaves nothing for Kahan's compensation to carry."""
    monkeypatch.setattr(anyprecision, "COMPILED_VALUES", 1)
    compiled = torch.compile(update, fullgraph=True, dynamic=False)
    whole, alone = (moved(how, torch.bfloat16, {}, "kahan") for how in (compiled, update))
    for name, value in alone.items():
        assert value.dtype is torch.bfloat16
        torch.testing.assert_close(whole[name], value, rtol=0, atol=0)
    assert any(alone[f"{n} compensation"].abs().max() > 0 for n in range(2))
    drawn = moved(compiled, torch.bfloat16, {}, "stochastic")
    for n in range(2):
        torch.testing.assert_close(drawn[f"{n}"], alone[f"{n}"], rtol=0.05, atol=0)
        assert not torch.equal(drawn[f"{n}"], alone[f"{n}"])


def test_what_is_no_number_stays_none() -> None:
    """A GPU's has every bit but the sign set, so that an offset added to them would make a zero of it."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000], dtype=torch.int32)
    broken = bits.view(torch.float32)
    rounded = broken.clone()
    anyprecision.round_at_random([rounded])
    assert rounded[0].isnan()
    weight, state = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    update(weight, broken, state, state.clone(), None, *scalars(1, 1e-3, (0.9, 0.999), 0.0), betas=(0.9, 0.999),
           eps=1e-8, rounding="nearest")
    assert weight[0].isnan()
    assert state[0].isnan()
