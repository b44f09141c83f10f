"""How long single ops take: by hand, by what may never happen, and from a calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.ops import CPU, GPU, MEASURED, RATE, add, attention, mm
from tightfit import system
from tightfit.calibration import MATMULS_IN_OP, Curve, Grid
from tightfit.devices import Device, find_device
from tightfit.errors import TightfitError
from tightfit.planning.timing import contractions
from tightfit.planning.timing.contractions import Matmul, matmul_of
from tightfit.planning.timing.op_times import KERNEL_START, NO_HALF_SHARE, lasting_seconds, op_seconds
from tightfit.planning.timing.rates import LASTING_SHARE, MEMORY_SHARE
from tightfit.trace import OpClass

A100, V100, H100, L4 = map(find_device, ("a100-80gb-sxm", "v100-16gb-sxm", "h100-sxm", "l4"))


def test_an_op_that_memory_binds():
    moved = op_seconds(add(4_000_000_000, bytes_written=2_000_000_000), GPU)
    assert moved == pytest.approx(6e9 / (1e12 * MEMORY_SHARE[8, 0]) + KERNEL_START)
    assert op_seconds(add(kernels=0), GPU) == 0.0
    assert op_seconds(add(kernels=5), GPU) - op_seconds(add(), GPU) == pytest.approx(4 * KERNEL_START)


@pytest.mark.parametrize(("flags", "share"), [
    ("flags\t\t: fpu avx avx2", NO_HALF_SHARE), ("flags : avx2 avx512bw", 1), ("Features : asimd bf16", 1), ("", 1),
])  # fmt: skip
def test_a_processor_without_instructions_for_it_multiplies_half_precision_slowly(tmp_path, monkeypatch, flags, share):
    monkeypatch.setattr(system, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\nbogomips : 1\n")
    system.multiplies_half.cache_clear()
    try:
        full, half = (op_seconds(mm(512, 512, 512, dtype=dtype), CPU) for dtype in ("float32", "bfloat16"))
    finally:
        system.multiplies_half.cache_clear()
    assert full / half == pytest.approx(share)


def test_one_tile_on_one_multiprocessor():
    rows, columns, speed = contractions.TILES[0]
    assert speed == 1.0
    seconds = contractions.matmul_seconds(Matmul(1, rows, columns, 4096), 1e12, 1)
    assert seconds == pytest.approx(2 * rows * columns * (4096 + contractions.PROLOGUE) / 1e12)
    ragged = contractions.matmul_seconds(Matmul(1, rows, columns + 1, 65536), 1e12, 1)
    assert ragged > 1.3 * contractions.matmul_seconds(Matmul(1, rows, columns, 65536), 1e12, 1)  # tile quantization


def test_one_tile_too_many_costs_a_wave():
    full = contractions.matmul_seconds(Matmul(1, 256 * 100, 128, 8192), 1e14, 100)
    over = contractions.matmul_seconds(Matmul(1, 256 * 101, 128, 8192), 1e14, 100)
    assert over > 1.15 * full
    assert contractions.matmul_seconds(Matmul(100, 256, 128, 8192), 1e14, 100) == pytest.approx(full)


@pytest.mark.parametrize("side", ["m", "n", "k", "batch"])
def test_more_of_a_product_never_takes_less(side):
    sizes = {"m": 512, "n": 768, "k": 1024, "batch": 2}
    seconds = [contractions.matmul_seconds(Matmul(**{**sizes, side: size}), 1e14, 108)
               for size in range(1 if side == "batch" else 64, 4096, 64)]
    assert seconds == sorted(seconds)


def test_large_products_come_near_the_share_of_the_peak_that_they_are_said_to_reach():
    seconds = op_seconds(mm(8192, 8192, 8192), A100)
    assert 0.75 < 2 * 8192**3 / seconds / A100.peak("bfloat16") < 0.87
    assert 2 * 128**3 / op_seconds(mm(128, 128, 128), A100) / A100.peak("bfloat16") < 0.02


@pytest.mark.parametrize("device", [A100, V100])
def test_a_misaligned_vocabulary_is_slower_although_it_is_smaller(device):
    odd, padded = ({dtype: op_seconds(mm(8192, vocabulary, 768, dtype), device) for dtype in ("float16", "float32")}
                   for vocabulary in (50257, 50304))
    assert odd["float16"] > 1.5 * padded["float16"]
    assert odd["float32"] <= padded["float32"]  # no tensor cores


def test_multiples_of_8_are_enough_but_on_the_a100():
    close = Matmul(1, 4096, 4104, 4096)
    assert contractions.alignment(close, 2, L4) == 1.0
    assert contractions.alignment(close, 2, A100) < 1.0
    assert contractions.alignment(Matmul(1, 4096, 4160, 4096), 2, A100) == 1.0
    assert contractions.alignment(Matmul(1, 4096, 4100, 4096), 4, L4) == 1.0  # 16 bytes of float32
    values = list(contractions.ALIGNMENT.values())
    assert values == sorted(values, reverse=True)


def test_only_odd_rows_cost_on_volta():
    assert contractions.alignment(Matmul(1, 4096, 4098, 4096), 2, V100) == 1.0
    assert contractions.alignment(Matmul(1, 4096, 4097, 4096), 2, V100) < 1.0


@pytest.mark.parametrize("shape", [(3137, 3137, 64), (3137, 64, 3137)])
def test_batched_products_over_odd_rows_crawl_on_hopper(shape):
    """Attention written out over 3,137 positions: 1,917 and 1,714 microseconds were recorded on an H100."""
    odd, even = (op_seconds(mm(*(side + more * (side > 64) for side in shape), batch=96), H100) for more in (0, 7))
    assert 1.6e-3 < odd < 2.2e-3
    assert odd > 2 * even


def test_formats_take_their_own_peaks():
    full, half = mm(4096, 4096, 4096, "float32"), mm(4096, 4096, 4096)
    assert op_seconds(half, A100) < op_seconds(full, A100, tf32=True) < op_seconds(full, A100)
    assert op_seconds(full, V100, tf32=True) == op_seconds(full, V100)  # no such units


def test_attention_kernels_and_lengths():
    flops = 10**13
    by_length = [op_seconds(attention(length, flops=flops), A100) for length in (128, 512, 2048, 8192)]
    assert by_length == sorted(by_length, reverse=True)
    for slower in ({"direction": "_backward"}, {"name": "efficient_attention"}):
        assert op_seconds(attention(2048, flops=flops, **slower), A100) > by_length[2], slower


@pytest.mark.parametrize(("shapes", "flops", "found"), [
    (((5, 7), (7, 3)), 2 * 5 * 7 * 3, Matmul(1, 5, 3, 7)),
    (((3,), (5, 7), (7, 3)), 2 * 5 * 7 * 3, Matmul(1, 5, 3, 7)),  # addmm, its bias first
    (((4, 5, 7), (4, 7, 3)), 2 * 4 * 5 * 7 * 3, Matmul(4, 5, 3, 7)),
    (((2, 5, 7), (3, 7)), 2 * 10 * 7 * 3, Matmul(1, 10, 3, 7)),  # a linear layer
    (((12, 7), (4, 7, 3)), 2 * 12 * 7 * 3, Matmul(4, 3, 3, 7)),  # grouped
    (((2, 3, 16, 16), (8, 3, 4, 4)), 2 * (2 * 16) * 8 * 48, Matmul(1, 32, 8, 48)),  # a convolution
    (((5, 7),), 70, None),
    (((5, 7), (7, 3)), 0, None),
])
def test_matmuls_are_found_in_shapes(shapes, flops, found):
    assert matmul_of(replace(add(), name="aten.x", shapes=shapes, flops=flops)) == found


def test_a_device_without_figures_is_refused():
    unknown = Device(kind="cuda", name="Mystery 9000", memory_bytes=1 << 34, capability=(9, 0))
    with pytest.raises(TightfitError, match=r"Mystery 9000.*--gpu.*calibrate"):
        op_seconds(add(), unknown)


def test_measured_ops_stand_for_others_of_their_family():
    assert op_seconds(add(10**6, name="aten.tanh.default"), CPU, MEASURED) == pytest.approx(1e-3)
    assert op_seconds(add(10**6, name="aten.something_else.default"), CPU, MEASURED) == pytest.approx(1e-4)
    assert op_seconds(mm(64, 64, 64, "float32", batch=8), CPU, MEASURED) == pytest.approx(8 * 2 * 64**3 / (2 * RATE))
    assert op_seconds(attention(64, flops=6 * 10**9), CPU, MEASURED) == pytest.approx(2.0)
    assert op_seconds(attention(64, flops=6 * 10**9, direction="_backward"), CPU, MEASURED) == pytest.approx(3.0)


def test_measured_matmuls_of_a_gpu_are_met_and_keep_the_shapes_own_tiles_in_between():
    sizes = (256, 4096)
    rates = tuple(tuple(tuple(1e13 * (1 + i + j + h) for h in range(2)) for j in range(2)) for i in range(2))
    measured = replace(MEASURED, device="card", kind="cuda", matmuls={"bfloat16": Grid(sizes, rates)}, batched_matmuls={
        "bfloat16": Grid(sizes, rates)})
    for i, m in enumerate(sizes):
        for j, n in enumerate(sizes):
            for h, k in enumerate(sizes):
                met = 2 * m * n * k / rates[i][j][h]
                assert op_seconds(mm(m, n, k), GPU, measured) == pytest.approx(met)
                assert op_seconds(mm(m, n, k, batch=MATMULS_IN_OP), GPU, measured) == pytest.approx(MATMULS_IN_OP * met)
    assert op_seconds(mm(4096, 2049, 4096), GPU, measured) > 1.3 * op_seconds(mm(4096, 2048, 4096), GPU, measured)


def test_layouts_cost_cycles():
    wide = {"name": "aten.mul.Tensor", "shapes": ((1 << 28,),), "dtype": "bfloat16", "bytes_written": 1 << 29}
    plain, strided, cast = (op_seconds(add(1 << 29, layout=layout, **wide), A100) for layout in ("", "strided", "cast"))
    assert plain < strided < cast


def test_power_limits_large_products_on_tensor_cores_most():
    def slower(side, dtype, share):
        full, half = (op_seconds(mm(side, side, side, dtype), replace(A100, sustains=each))
                      for each in (share, share / 2))
        return half / full

    assert slower(8192, "bfloat16", 1.0) == pytest.approx(2.0, rel=0.05)
    assert 1.0 < slower(8192, "float32", 1.0) < slower(8192, "bfloat16", 1.0)
    assert slower(128, "bfloat16", 0.8) == 1.0  # few multiprocessors draw little


def test_a_products_weights_are_not_in_the_cache_any_more():
    product = mm(16, 4096, 2048)
    assert 0.16 * A100.l2_bytes < product.bytes_read < 0.7 * A100.l2_bytes
    read = op_seconds(product, A100)
    assert read > product.bytes_read / A100.bandwidth
    assert op_seconds(add(product.bytes_read), A100) < read


def norm(rows, columns, device, dtype="float32"):
    size = rows * columns * (4 if dtype == "float32" else 2)
    made = add(size, name="aten.native_layer_norm.default", op_class=OpClass.NORMALIZATION, dtype=dtype,
               shapes=((rows, columns),), bytes_written=size)
    return op_seconds(made, device)


def test_a_norms_rows_are_read_again_where_the_cache_does_not_hold_them():
    short, long = norm(1 << 16, 2048, L4), norm(1 << 13, 1 << 14, L4)  # as many elements
    assert long == pytest.approx(1.5 * short, rel=0.05)
    assert norm(1 << 16, 2048, A100, "bfloat16") < norm(1 << 16, 2048, A100)


def softmax(columns, device, name="_log_softmax"):
    size = (1 << 28) // columns * columns * 4
    made = add(size, name=f"aten.{name}.default", op_class=OpClass.NORMALIZATION,
               shapes=((size // columns // 4, columns),), bytes_written=size)
    return op_seconds(made, device)


def test_a_softmax_reads_long_rows_again():
    assert softmax(1 << 16, A100) == pytest.approx(2 * softmax(1 << 10, A100), rel=0.01)
    assert softmax(1023, A100) > softmax(1024, A100)  # not aligned to 16 bytes
    assert softmax(1 << 12, A100, "_log_softmax_backward_data") > 1.5 * softmax(1 << 12, A100)


def test_one_block_of_threads_adds_the_losses_of_all_tokens_up():
    losses = add(16384 * 8, name="aten.nll_loss_forward.default", op_class=OpClass.OTHER, shapes=((16384, 32000),))
    assert 4e-4 < op_seconds(losses, A100) < 5e-4


def test_rows_that_are_not_aligned_are_slow():
    product = Matmul(1, 4096, 4096, 4096, rows=(4096, 4096, 4096))
    assert contractions.alignment(product._replace(rows=(4096, 4097, 4096)), 2, L4) < 0.5
    assert contractions.alignment(product._replace(m=4097), 2, A100) == 1.0  # rows lead no dimension


def test_a_cast_from_fp32_is_as_any_other_op():
    wide = {"name": "aten._to_copy.default", "shapes": ((1 << 28,),), "bytes_written": 1 << 29}
    plain, cast = (op_seconds(add(1 << 30, layout=layout, **wide), H100) for layout in ("", "cast"))
    assert plain == cast
    assert op_seconds(add(1 << 30, layout="cast", **wide, dtype="bfloat16"), H100) > 1.4 * cast


def test_sums_of_columns_are_slower_than_sums_of_rows():
    matrix = {"name": "aten.sum.dim_IntList", "op_class": OpClass.NORMALIZATION, "shapes": ((1 << 16, 4096),)}
    rows, columns = (op_seconds(add(1 << 30, **matrix, bytes_written=4 * count), H100) for count in (1 << 16, 4096))
    assert columns > 1.5 * rows


def test_a_vocabulary_of_odd_size_costs_most_on_the_newest_cards():
    def odd(device, size, dtype="bfloat16"):
        return op_seconds(mm(16384, size, 768, dtype), device) / op_seconds(mm(16384, 50304, 768, dtype), device)

    assert odd(H100, 50257) > odd(H100, 50258) > 2.2
    assert odd(H100, 50257) > 1.8 * odd(A100, 50257)


@pytest.mark.parametrize("name", ["cudnn_attention", "flash_attention", "efficient_attention"])
def test_dropout_slows_attention_down_forward_more_than_backward(name):
    forward, backward = (
        op_seconds(replace(op, layout="dropout"), H100) / op_seconds(op, H100)
        for op in (attention(4096, name=name), attention(4096, name=name, direction="_backward")))
    assert forward > backward > 1.05


def test_a_cards_measured_memory_scales_what_its_figures_say():
    size = 1 << 30
    slow = Curve((1e3, size), (1e-6, 2 * (size / (1e12 * MEMORY_SHARE[8, 0]) + KERNEL_START)))
    measured = replace(MEASURED, kind="cuda", matmuls={}, batched_matmuls={}, memory={"add": {"float32": slow}})
    for op in (add(size), add(size, layout="strided", shapes=((1 << 28,),))):
        start = op_seconds(replace(op, bytes_read=0, shapes=()), GPU)
        assert op_seconds(op, GPU, measured) - start == pytest.approx(2 * (op_seconds(op, GPU) - start))


def test_tensor_cores_are_slower_in_steps_one_after_another_from_hopper_on():
    product, plain = mm(4096, 4096, 4096), add(10**9)
    share = LASTING_SHARE[9, 0]
    assert lasting_seconds(product, H100) == pytest.approx(op_seconds(product, H100) / share)
    for op, device in ((product, A100), (plain, H100), (mm(4096, 4096, 4096, "float32"), H100)):
        assert lasting_seconds(op, device) == op_seconds(op, device)
