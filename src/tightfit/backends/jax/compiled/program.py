"""The optimized program of a compiled step, read from XLA's dump, and where its instructions come from in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tightfit.trace import Phase

MODULE = re.compile(r"HloModule ([^\s,]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"  (ROOT )?%?(\S+) = (.+?) ([\w\-]+)\((.*)")
OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)?)")
"""An operand's name; of an instruction with several results, JAX 0.11 has XLA write which: `%while.1#2`."""
INSIDE = re.compile(r"(?:calls|body|to_apply)=%?([\w.\-]+)")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")

DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "s32": "int32", "u32": "uint32",
    "s64": "int64", "pred": "bool", "s8": "int8", "u8": "uint8",
}  # fmt: skip
"""Number formats by XLA's names."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "uint32": 4, "int64": 8}
STACKING = "dynamic-update-slice"
"""The instruction that writes one turn's arrays into those that hold a whole loop's."""
RECOMPUTED = "rematted_computation"
"""JAX's name for the part of a backward pass that computes the forward pass again."""
WRAPPERS = re.compile(
    r"^(?:jit\(.*\)|while|body|closed_call|eval_jaxpr|checkpoint|remat|cond|rematted_computation|branch_\d+.*)$")
WRAPPED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")

Array = tuple[str, tuple[int, ...]]
"""An array's number format and shape."""


@dataclass(eq=False)
class Instruction:
    """One line of the program.

    names: its operands'. text: all behind its operation's bracket. root: whether it gives its computation's result.
    operands: the instructions whose results it takes. body: the instructions of a fusion, by name.
    """

    name: str
    code: str
    results: list[Array]
    names: list[str]
    text: str
    root: bool = False
    operands: list[Instruction] = field(default_factory=list)
    body: Mapping[str, Instruction] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 1) for dtype, shape in self.results)

    @property
    def op_name(self) -> str:
        """JAX's name for what it computes: the transformations, the named scopes, the operation."""
        found = OP_NAME.search(self.text)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def stacks(self) -> bool:
        """Whether it writes into slices of larger arrays, as a loop stacks what it keeps."""
        return any(each.code == STACKING for each in (self, *self.body.values()))

    def origin(self, loop: str) -> str:
        """JAX's name for what a kernel computes. One that stacks arrays, or that XLA put in, is named by what is fused
        into it, by its operands, or by its loop. loop: the name of its loop."""
        own = self.op_name
        if own and not self.stacks:
            return own
        inside = _deepest(each.op_name for each in self.body.values() if each.code != STACKING)
        operands = _deepest(each.op_name for each in self.operands)
        return next((name for name in (inside, operands) if len(scope(name)) > len(scope(own))), own or loop)


@dataclass
class Program:
    """name: XLA's of the module. computations: the instructions of each, by name, in the order in which they run."""

    name: str = ""
    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)


def read_program(text: str) -> Program:
    """The program in the text of XLA's dump after its optimizations."""
    program, lines = Program(), dict[str, Instruction]()
    for line in text.splitlines():
        if found := INSTRUCTION.match(line):
            root, name, results, code, rest = found.groups()
            operands = OPERAND.findall(rest.partition("), ")[0])
            lines[name] = Instruction(name, code, arrays_of(results), operands, rest, bool(root))
        elif found := COMPUTATION.match(line):
            lines = program.computations.setdefault(found[2], {})
            program.entry = found[2] if found[1] else program.entry
        elif found := MODULE.match(line):
            program.name = found[1]
    for lines in program.computations.values():
        lines.update({name: _result(lines, name) for each in [*lines.values()] for name in each.names if "#" in name})
        for each in lines.values():
            each.operands = [lines[name] for name in each.names if name in lines]
            inside = INSIDE.search(each.text)
            called = program.computations.get(inside[1], {}) if inside else {}
            if each.code == "async-start":  # JAX 0.11: work beside other work; it counts as the fusion that it wraps
                for fusion in (inner for inner in called.values() if inner.root and inner.code == "fusion"):
                    each.code, each.results, each.text = fusion.code, fusion.results, f"{fusion.text} {each.text}"
                    called = program.computations[INSIDE.findall(fusion.text)[0]]
            each.body = called if each.code == "fusion" else {}
    return program


def phase_of(op_name: str) -> Phase:
    """The part of the step that an instruction comes from, by JAX's name for it."""
    if "/optimizer" in op_name:
        return Phase.OPTIMIZER
    if RECOMPUTED in op_name:
        return Phase.RECOMPUTE
    return Phase.BACKWARD if "transpose(" in op_name or "/accumulation" in op_name else Phase.FORWARD


def scope(op_name: str) -> str:
    """The named scopes of an instruction, dotted, without JAX's own transformations and the operation itself; of
    several that XLA joined, the first one's."""
    parts = []
    for part in op_name.partition(";")[0].split("/")[:-1]:
        while found := WRAPPED.match(part):
            part = found[1]
        if part and "<locals>" not in part and "->" not in part and not WRAPPERS.match(part):
            parts.append(part)
    return ".".join(parts)


def arrays_of(text: str) -> list[Array]:
    """The arrays in a text such as `(f32[2,3]{1,0}, s32[])`."""
    return [(DTYPES.get(dtype, dtype), tuple(int(length) for length in shape.split(",") if length))
            for dtype, shape in ARRAY.findall(text)]


def _deepest(names: Iterable[str]) -> str:
    """The name with the longest scope; of several the first."""
    return max(names, key=lambda name: len(scope(name)), default="")


def _result(lines: dict[str, Instruction], name: str) -> Instruction:
    """One of an instruction's results, as the instruction that JAX 0.10 has XLA write for it."""
    whole, _, index = name.partition("#")
    results = lines[whole].results[int(index) :][:1] if whole in lines else []
    return Instruction(name, "get-tuple-element", results, [whole], f"%{whole}), index={index}")
