"""A profile's events: seconds by instruction on threads and on streams, and what belongs to none."""

from __future__ import annotations

import pytest
from jax.profiler import ProfileData

from tightfit.backends.jax.compiled.step_profiler import read_events

NAMES = ["hlo_op", "hlo_module", "device_ordinal", "_pt", "_p", "_ct", "_c"]


def stat(name, value):
    kind = "str_value" if isinstance(value, str) else "int64_value"
    return f'stats {{ metadata_id: {NAMES.index(name) + 1} {kind}: {value!r} }}'.replace("'", '"')


def plane(name, line, *events):
    """events: name, start and length in nanoseconds, stats."""
    names = list(dict.fromkeys(event[0] for event in events))
    described = "".join(
        f'{kind}_metadata {{ key: {number} value {{ id: {number} name: "{called}" }} }}'
        for kind, known in (("event", names), ("stat", NAMES)) for number, called in enumerate(known, 1))
    listed = "".join(
        f"events {{ metadata_id: {names.index(called) + 1} offset_ps: {1000 * start} duration_ps: {1000 * length} "
        f"{' '.join(stat(key, value) for key, value in stats.items())} }}" for called, start, length, stats in events)
    return f'planes {{ name: "{name}" {described} lines {{ name: "{line}" {listed} }} }}'


def of(instruction, **more):
    return {"hlo_op": instruction, "hlo_module": "jit_step", **more}


def read(platform, *planes):
    return read_events(ProfileData.text_proto_to_serialized_xspace("".join(planes)), "jit_step", platform)


def test_a_processors_instructions_end_where_the_last_thread_does():
    seconds, others = read("cpu", plane(
        "/host:CPU", "thread",
        ("dot.1", 100, 50, of("dot.1", _pt=0, _p=7)), ("dot.1", 400, 50, of("dot.1", _pt=0, _p=8)),
        ("end: dot.1", 290, 10, {"_ct": 0, "_c": 7}), ("end: other", 900, 10, {"_ct": 15, "_c": 8}),
        ("add.2", 600, 20, {"hlo_op": "add.2", "hlo_module": "jit_other"}), ("python", 0, 1000, {}),
        ("dot.1", 700, 50, of("dot.1", device_ordinal=1))))  # fmt: skip
    assert dict(seconds) == {"dot.1": pytest.approx(250e-9)}
    assert not others


def test_a_cards_kernels_belong_to_the_instruction_that_launched_them():
    kernels = (("gemm_kernel", 0, 30, of("gemm.3")), ("reduce_kernel", 30, 10, of("gemm.3")), ("Memcpy", 50, 5, {}))
    seconds, others = read("gpu", plane("/device:GPU:0", "Stream #20(Compute)", *kernels),
                 plane("/device:GPU:0", "XLA Ops", *kernels), plane("/device:GPU:1", "Stream #20", *kernels),
                 plane("/host:CPU", "thread", ("gemm.3", 0, 900, of("gemm.3"))))
    assert dict(seconds) == {"gemm.3": pytest.approx(40e-9)}
    assert dict(others) == {"Memcpy": pytest.approx(5e-9)}
