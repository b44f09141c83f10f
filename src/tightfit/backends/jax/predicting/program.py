"""The optimized program of a compiled step, read from XLA's dump: what each kernel multiplies and moves.

XLA's own cost analysis is empty for a GPU that is not there, and counts the inside of a loop once. Here products are
counted from their shapes, bytes from what a kernel reads and writes, and both as often as the loops around them run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightfit.backends.jax.predicting.buffers import ARRAY, DTYPES
from tightfit.trace import Op, OpClass, Phase

COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"  (?:ROOT )?%?(\S+) = (.*)")
OPERAND = re.compile(r"%([\w.\-]+)")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
INSIDE = re.compile(r"(?:calls|body|to_apply)=%?([\w.\-]+)")
CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
BATCH = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "while", "conditional", "call",
        "partition-id", "opt-barrier"}  # fmt: skip
"""What takes no time by itself."""
WAITING = ("-done", "-update")
"""How the second halves end of what runs beside other kernels."""
SLICES = {"dynamic-slice", "slice", "gather"}
"""What reads no more of its first operand than it gives."""
SEEN_THROUGH = {"bitcast", "convert", "copy", "reshape", "transpose"}
"""What hands on as many elements as it is given."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "uint32": 4, "int64": 8}
RECOMPUTED = "rematted_computation"
"""What JAX names the part of a backward pass that computes the forward pass again."""
WRAPPERS = re.compile(r"^(?:jit\(.*\)|while|body|closed_call|checkpoint|remat|cond|rematted_computation|branch_\d+.*)$")
WRAPPED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")


@dataclass
class Instruction:
    """One line of the program. results: format and shape of each. text: all behind its results."""

    name: str
    code: str
    results: list[tuple[str, tuple[int, ...]]]
    operands: list[str]
    text: str
    root: bool = False

    @property
    def bytes(self) -> int:
        return sum(_bytes(result) for result in self.results)

    @property
    def op_name(self) -> str:
        found = OP_NAME.search(self.text)
        return found[1].replace("\\'", "'") if found else ""


@dataclass
class Program:
    """computations: the instructions of each, by name, in the order in which they run."""

    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)

    def origins(self) -> dict[str, str]:
        """What each instruction belongs to in the model, by its name; its inputs by what a person calls them."""
        return {name: instruction.op_name if instruction.code == "parameter" else scope(instruction.op_name)
                for lines in self.computations.values() for name, instruction in lines.items()}  # fmt: skip


def read_program(text: str) -> Program:
    """The program in the text of XLA's dump after its optimizations."""
    program, lines = Program(), dict[str, Instruction]()
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := COMPUTATION.match(line):
                lines = program.computations.setdefault(found[2], {})
                program.entry = found[2] if found[1] else program.entry
        elif found := INSTRUCTION.match(line):
            made = _instruction(found[1], found[2], line.startswith("  ROOT"))
            lines[made.name] = made
    return program


def ops(program: Program, positions: Mapping[str, int]) -> list[Op]:
    """Every kernel of the step, each once, with what all its runs multiply and move.

    positions: each instruction's place in the order in which the program runs.
    """
    return list(_ops(program, program.entry, 1, positions))


def phase_of(op_name: str) -> Phase:
    """The part of the step that an instruction comes from, by the name that JAX gives it."""
    if "/optimizer" in op_name:
        return Phase.OPTIMIZER
    if RECOMPUTED in op_name:
        return Phase.RECOMPUTE
    return Phase.BACKWARD if "transpose(" in op_name else Phase.FORWARD


def scope(op_name: str) -> str:
    """The named scopes of an instruction, dotted, without JAX's own transformations and the operation itself."""
    parts = []
    for part in op_name.split("/")[:-1]:
        while found := WRAPPED.match(part):
            part = found[1]
        if part and "<locals>" not in part and not WRAPPERS.match(part):
            parts.append(part)
    return ".".join(parts)


def _ops(program: Program, computation: str, runs: int, positions: Mapping[str, int]) -> Iterator[Op]:
    lines = program.computations[computation]
    for instruction in lines.values():
        inside = INSIDE.findall(instruction.text)
        if instruction.code in ("while", "call", "conditional"):
            trips = TRIPS.search(instruction.text)
            for each in inside:
                if each in program.computations:
                    yield from _ops(program, each, runs * (int(trips[1]) if trips else 1), positions)
        elif instruction.code not in FREE and not instruction.code.endswith(WAITING):
            body = program.computations.get(inside[0], {}) if inside else {}
            yield _op(instruction, lines, body, runs, positions)


def _op(
    instruction: Instruction, around: Mapping[str, Instruction], body: Mapping[str, Instruction], runs: int,
    positions: Mapping[str, int],
) -> Op:  # fmt: skip
    product = _product(instruction, around, body)
    read, written = _moved(instruction, around, body)
    dtype = product[0] if product else (instruction.results[0][0] if instruction.results else "")
    shapes: tuple[tuple[int, ...], ...] = ()
    name = f"fused {instruction.name.split('.')[0]}"
    if product:
        batch, m, n, k = product[1]
        shapes = ((runs * batch, m, k), (runs * batch, k, n))
        if (target := TARGET.search(instruction.text)) is not None and "fmha" in target[1]:
            name = f"fused cudnn attention{' backward' * ('Backward' in target[1])}"
            shapes = ((runs * batch, 1, m, k),)
    return Op(
        name=name, tick=positions.get(instruction.name, 0) + 1,
        phase=phase_of(instruction.op_name), op_class=_class(instruction, body, product is not None),
        module=scope(instruction.op_name), shapes=shapes, dtype=dtype,
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
    if instruction.code == "dynamic-update-slice":
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
        if each.code == "dynamic-update-slice":  # written in place: no more than the slice
            update = body.get(each.operands[1])
            written -= min(each.bytes - (update.bytes if update else 0), written)
    return read, written


def _read(value: Instruction, users: Mapping[str, list[Instruction]]) -> int:
    """Bytes of a kernel's input that it reads."""
    total = 0
    for user in users.get(value.name, ()):
        if user.code in SLICES and user.operands[0] == value.name:
            total += user.bytes
        elif user.code == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.code in SEEN_THROUGH:
            total += min(value.bytes, _read(user, users) * value.bytes // max(user.bytes, 1))
        else:
            return value.bytes
    return min(total, value.bytes)


def _class(instruction: Instruction, body: Mapping[str, Instruction], product: bool) -> OpClass:
    codes = {each.code for each in body.values()} | {instruction.code}
    if product:
        return OpClass.CONTRACTION
    if "reduce" in codes:
        return OpClass.NORMALIZATION
    arithmetic = {"add", "multiply", "subtract", "divide", "exponential", "tanh", "select", "compare", "rsqrt"}
    return OpClass.ELEMENTWISE if codes & arithmetic else OpClass.MOVEMENT


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """text: `f32[2,3]{1,0} add(%a, %b), ...`; several results stand in brackets."""
    if text.startswith("("):
        end = _closing(text, 0)
        results, rest = text[: end + 1], text[end + 2 :]
    else:
        results, _, rest = text.partition(" ")
    code, _, behind = rest.partition("(")
    operands = OPERAND.findall(behind[: _closing(f"({behind}", 0)])
    arrays = [(DTYPES.get(dtype, dtype), tuple(int(n) for n in shape.split(",") if n))
              for dtype, shape in ARRAY.findall(results)]  # fmt: skip
    return Instruction(name, code, arrays, operands, rest, root)


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return len(text) - 1


def _bytes(result: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = result
    return math.prod(shape) * ITEM_BYTES.get(dtype, 1)
