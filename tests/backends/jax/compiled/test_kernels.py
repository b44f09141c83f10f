"""The optimized program: products by their shapes, bytes by what is read and written, both as often as loops run."""

from __future__ import annotations

import pytest

from tightfit.backends.jax.compiled.kernels import kernels as kernels_of
from tightfit.backends.jax.compiled.program import phase_of, read_program, scope
from tightfit.trace import OpClass, Phase

TEXT = r"""HloModule jit_step, is_scheduled=true

%fused_dot (p0: bf16[8,32], p1: bf16[32,16]) -> bf16[8,16] {
  %p0 = bf16[8,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_update (p0.1: f32[12,8,16], p1.1: f32[1,8,16], p2.1: s32[]) -> f32[12,8,16] {
  %p0.1 = f32[12,8,16]{2,1,0} parameter(0)
  %p1.1 = f32[1,8,16]{2,1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %dus.1 = f32[12,8,16]{2,1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1)
}

%body (arg: (s32[], f32[12,8,16])) -> (s32[], f32[12,8,16]) {
  %arg = (s32[], f32[12,8,16]{2,1,0}) parameter(0)
  %number = s32[] get-tuple-element(%arg), index=0
  %all = f32[12,8,16]{2,1,0} get-tuple-element(%arg), index=1
  %x = bf16[8,32]{1,0} constant({...})
  %w = bf16[32,16]{1,0} constant({...})
  %gemm.3 = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(step)/while/body/closed_call/transpose(jvp(head))/rematted_computation/layer/mlp/dot_general"}
  %one = f32[1,8,16]{2,1,0} convert(%gemm.3), metadata={op_name="jit(step)/while/body/closed_call/transpose(jvp(head))/rematted_computation/layer/mlp/convert"}
  %update = f32[12,8,16]{2,1,0} fusion(%all, %one, %number), kind=kLoop, calls=%fused_update, metadata={op_name="jit(step)/jvp()/while"}
  ROOT %result = (s32[], f32[12,8,16]{2,1,0}) tuple(%number, %update)
}

ENTRY %main (weight: f32[4,8]) -> f32[4,8] {
  %weight = f32[4,8]{1,0} parameter(0), metadata={op_name="state[\'params\'][\'w\']"}
  %zero = s32[] constant(0)
  %nothing = f32[12,8,16]{2,1,0} constant({...})
  %copy.1 = f32[12,8,16]{2,1,0} copy(%nothing)
  %start = (s32[], f32[12,8,16]{2,1,0}) tuple(%zero, %copy.1)
  %while.1 = (s32[], f32[12,8,16]{2,1,0}) while(%start), condition=%cond, body=%body, metadata={op_name="jit(step)/jvp(layers)/while"}, backend_config={"known_trip_count":{"n":"12"}}
  %kept = f32[12,8,16]{2,1,0} get-tuple-element(%while.1), index=1
  %copy.2 = f32[12,8,16]{2,1,0} copy(%kept)
  %blas = (f32[4,6]{1,0}, s8[1024]{0}) custom-call(%weight, %weight), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %copy.9 = f32[4,8]{1,0} copy(%weight), metadata={op_name="jit(step)/optimizer/sub"}
}
"""  # noqa: E501 - as XLA writes it


@pytest.fixture(scope="module")
def program():
    return read_program(TEXT)


@pytest.fixture(scope="module")
def kernels(program):
    return kernels_of(program, {"copy.9": 41})


def test_jax_0_11_writes_the_same_step_with_parts_by_number_and_fusions_that_run_beside_others(kernels):
    text = TEXT.replace("  %number = s32[] get-tuple-element(%arg), index=0\n", "")
    text = text.replace("  %all = f32[12,8,16]{2,1,0} get-tuple-element(%arg), index=1\n", "")
    start = ("  %update-start = ((f32[12,8,16], f32[1,8,16], s32[]), f32[12,8,16]{2,1,0}, u32[]) "
             'async-start(%arg#1, %one, %arg#0), calls=%beside, metadata={op_name="jit(step)/jvp()/while"}\n'
             "  %update = f32[12,8,16]{2,1,0} async-done(%update-start)\n")
    before, _, rest = text.partition("  %update = ")
    text = (before + start + rest.partition("\n")[2]).replace("tuple(%number, %update)", "tuple(%arg#0, %update)")
    text = text.replace("%body (arg", """%beside (q0: f32[12,8,16], q1: f32[1,8,16], q2: s32[]) -> f32[12,8,16] {
  %q0 = f32[12,8,16]{2,1,0} parameter(0)
  %q1 = f32[1,8,16]{2,1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %inside = f32[12,8,16]{2,1,0} fusion(%q0, %q1, %q2), kind=kLoop, calls=%fused_update
}

%body (arg""")
    again = kernels_of(read_program(text), {"copy.9": 41})
    assert again.pop("update-start") == kernels["update"]
    assert again == {name: op for name, op in kernels.items() if name != "update"}


def test_a_product_counts_as_often_as_its_loop_runs(kernels):
    gemm = kernels["gemm.3"]
    assert gemm.flops == 12 * 2 * 8 * 32 * 16
    assert (gemm.dtype, gemm.kernels, gemm.op_class) == ("bfloat16", 12, OpClass.CONTRACTION)
    assert gemm.bytes_read == 12 * 2 * (8 * 32 + 32 * 16)
    assert kernels["blas"].flops == 2 * 4 * 6 * 8


def test_writing_a_slice_in_place_moves_no_more_than_the_slice(kernels):
    update = kernels["update"]
    assert update.bytes_written == 12 * 4 * 8 * 16
    assert update.bytes_read == 12 * (4 * 8 * 16 + 4)


def test_names_tell_the_phase_and_the_place_in_the_model(program, kernels):
    assert kernels["gemm.3"].phase is Phase.RECOMPUTE
    assert kernels["gemm.3"].module == "head.layer.mlp"
    assert (kernels["copy.9"].phase, kernels["copy.9"].tick) == (Phase.OPTIMIZER, 42)
    assert phase_of("jit(step)/transpose(jvp())/mul") is Phase.BACKWARD
    assert phase_of("jit(step)/jvp()/mul") is Phase.FORWARD
    assert scope("jit(step)/jvp(embed)/add") == "embed"
    joined = "jit(step)/jvp(layers)/attention/transpose;jit(step)/transpose(jvp(layers))/mlp/dot"
    assert (scope(joined), phase_of(joined)) == ("layers.attention", Phase.BACKWARD)
    assert program.computations["main"]["weight"].op_name == "state['params']['w']"


def test_what_a_loop_stacks_is_told_apart_and_known_by_what_computed_it(kernels):
    update = kernels["update"]
    assert (update.name, update.op_class) == ("fused dynamic-update-slice", OpClass.MOVEMENT)
    assert (update.module, update.phase) == ("head.layer.mlp", Phase.RECOMPUTE)
    assert kernels["gemm.3"].name == "fused gemm"
