"""The kernels of a compiled step: where each comes from in the model, what it multiplies and what it moves.

XLA's own cost analysis is empty for a GPU that is not there, and counts the inside of a loop once. Here products are
counted from their shapes, bytes from what a kernel reads and writes, and both as often as the loops around them run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tightfit.backends.jax.compiled.buffers import STACKING
from tightfit.backends.jax.compiled.origins import INSIDE, PASSES_ON, body_of, origin, stacks
from tightfit.backends.jax.compiled.program import Instruction, Program, phase_of, scope
from tightfit.trace import Op, OpClass

TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
BATCH = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")

CALLS = {"while", "call", "conditional"}
"""What runs other instructions, which take the time."""
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "opt-barrier"}
"""What takes no time by itself."""
WAITING = ("-done", "-update")
"""How the second halves end of what runs beside other kernels."""
SLICES = {"dynamic-slice", "slice", "gather"}
"""What reads no more of its first operand than it gives."""


def kernels(program: Program, positions: Mapping[str, int]) -> dict[str, Op]:
    """Every kernel of the step by its instruction's name, each once, with what all its runs multiply and move.

    positions: each instruction's place in the order in which the program runs.
    """
    return dict(_kernels(program, program.entry, 1, "", positions))


def _kernels(
    program: Program, computation: str, runs: int, around: str, positions: Mapping[str, int]
) -> Iterator[tuple[str, Op]]:
    """around: the name that JAX gave the loop that runs the computation, for instructions that XLA put in itself."""
    lines = program.computations[computation]
    fed = dict(_fed(lines))
    for instruction in lines.values():
        if instruction.code in CALLS:
            trips = TRIPS.search(instruction.text)
            times = runs * (int(trips[1]) if trips else 1)
            for each in INSIDE.findall(instruction.text):
                if each in program.computations:
                    yield from _kernels(program, each, times, instruction.op_name or around, positions)
        elif instruction.code not in FREE and not instruction.code.endswith(WAITING):
            named = origin(program, lines, instruction, fed.get(instruction.name, around))
            tick = positions.get(instruction.name, 0) + 1
            yield instruction.name, _op(program, instruction, lines, runs, named, tick)


def _fed(lines: Mapping[str, Instruction]) -> Iterator[tuple[str, str]]:
    """What a loop begins with, by the names of the instructions that make it: the name that JAX gave the loop."""
    for loop in lines.values():
        given = lines.get(loop.operands[0]) if loop.code == "while" else None
        for name in given.operands if given is not None else ():
            yield name, loop.op_name


def _op(
    program: Program, instruction: Instruction, beside: Mapping[str, Instruction], runs: int, named: str, tick: int
) -> Op:
    """named: by JAX."""
    body = body_of(program, instruction)
    product = _product(instruction, beside, body)
    read, written = _moved(instruction, beside, body)
    dtype = product[0] if product else (instruction.results[0][0] if instruction.results else "")
    shapes: tuple[tuple[int, ...], ...] = ()
    stacking = product is None and stacks(program, instruction)
    name = f"fused {STACKING if stacking else instruction.name.split('.')[0]}"
    if product:
        batch, m, n, k = product[1]
        shapes = ((runs * batch, m, k), (runs * batch, k, n))
        if (target := TARGET.search(instruction.text)) is not None and "fmha" in target[1]:
            name = f"fused cudnn attention{' backward' * ('Backward' in target[1])}"
            shapes = ((runs * batch, 1, m, k),)
    return Op(
        name=name, tick=tick, phase=phase_of(named), module=scope(named), shapes=shapes, dtype=dtype,
        op_class=OpClass.MOVEMENT if stacking else _class(instruction, body, product is not None),
        flops=2 * runs * math.prod(product[1]) if product else 0,
        bytes_read=runs * read, bytes_written=runs * written, kernels=runs,
    )  # fmt: skip


def _product(
    instruction: Instruction, around: Mapping[str, Instruction], body: Mapping[str, Instruction]
) -> tuple[str, tuple[int, int, int, int]] | None:
    """The format of a product's operands, and its batch, rows, columns and depth; None for what multiplies none."""
    dot = next((i for i in body.values() if i.code == "dot"), None)
    if dot is not None:
        return _dot(dot, body, CONTRACTING, BATCH)
    if instruction.code == "dot":
        return _dot(instruction, around, CONTRACTING, BATCH)
    target = TARGET.search(instruction.text)
    if instruction.code != "custom-call" or target is None:
        return None
    operands = [around[name].results[0] for name in instruction.operands if name in around]
    if "gemm" in target[1] or "matmul" in target[1]:
        numbers = _numbers(instruction.text)
        result = next(r for r in instruction.results if r[1])
        return _shaped(operands[0], result, numbers("lhs_contracting_dimensions"), numbers("lhs_batch_dimensions"))
    if "fmha" in target[1] and len(operands) >= 2:  # scores and mixing; the gradients are five more such products
        times = 5 if "Backward" in target[1] else 2
        (dtype, query), (_, key) = operands[0], operands[1]
        length, depth = query[1] if len(query) == 4 else 1, query[-1]
        heads = math.prod(query) // max(length * depth, 1)
        return dtype, (times * heads, length, key[1] if len(key) == 4 else length, depth)
    return None


def _dot(
    dot: Instruction, around: Mapping[str, Instruction], contracting: re.Pattern[str], batch: re.Pattern[str]
) -> tuple[str, tuple[int, int, int, int]] | None:
    left = around.get(dot.operands[0])
    if left is None or not dot.results:
        return None

    def places(pattern: re.Pattern[str]) -> list[int]:
        found = pattern.search(dot.text)
        return [int(place) for place in found[1].split(",") if place] if found else []

    return _shaped(left.results[0], dot.results[0], places(contracting), places(batch))


def _shaped(
    left: tuple[str, tuple[int, ...]], result: tuple[str, tuple[int, ...]], contracting: Sequence[int],
    batch: Sequence[int],
) -> tuple[str, tuple[int, int, int, int]]:  # fmt: skip
    dtype, shape = left
    depth = math.prod(shape[place] for place in contracting)
    count = math.prod(shape[place] for place in batch)
    rows = math.prod(shape) // max(depth * count, 1)
    columns = math.prod(result[1]) // max(rows * count, 1)
    return dtype, (count, rows, columns, depth)


def _numbers(text: str) -> Any:
    """Reads lists of numbers of that name out of an instruction's configuration."""

    def named(name: str) -> list[int]:
        found = re.search(rf'"{name}":(\[[^\]]*\])', text)
        return [int(number) for number in json.loads(found[1])] if found else []

    return named


def _moved(
    instruction: Instruction, around: Mapping[str, Instruction], body: Mapping[str, Instruction]
) -> tuple[int, int]:
    """Bytes read and written by one run."""
    operands = [around[name].bytes if name in around else 0 for name in instruction.operands]
    if instruction.code in SLICES:
        return instruction.bytes, instruction.bytes
    if instruction.code == STACKING:
        return operands[1], operands[1]
    written = instruction.bytes
    if not body:
        return sum(operands), written
    users: dict[str, list[Instruction]] = {}
    for each in body.values():
        for name in each.operands:
            users.setdefault(name, []).append(each)
    inputs = [each for each in body.values() if each.code == "parameter"]
    read = 0
    for each in inputs:
        number = re.match(r"parameter\((\d+)\)", each.text)
        place = int(number[1]) if number else 0
        whole = operands[place] if place < len(operands) else each.bytes
        read += min(whole, _read(each, users))
    for each in body.values():
        if each.code == STACKING:  # written in place: no more than the slice
            update = body.get(each.operands[1])
            written -= min(each.bytes - (update.bytes if update else 0), written)
    return read, written


def _read(value: Instruction, users: Mapping[str, list[Instruction]]) -> int:
    """Bytes of a kernel's input that it reads."""
    total = 0
    for user in users.get(value.name, ()):
        if user.code in SLICES and user.operands[0] == value.name:
            total += user.bytes
        elif user.code == STACKING and user.operands[0] == value.name:
            continue
        elif user.code in PASSES_ON:
            total += min(value.bytes, _read(user, users) * value.bytes // max(user.bytes, 1))
        else:
            return value.bytes
    return min(total, value.bytes)


def _class(instruction: Instruction, body: Mapping[str, Instruction], product: bool) -> OpClass:
    codes = {each.code for each in body.values()} | {instruction.code}
    if product:
        return OpClass.CONTRACTION
    if codes & {"reduce", "reduce-window"}:
        return OpClass.NORMALIZATION
    arithmetic = {"add", "multiply", "subtract", "divide", "exponential", "tanh", "select", "compare", "rsqrt"}
    return OpClass.ELEMENTWISE if codes & arithmetic else OpClass.MOVEMENT


