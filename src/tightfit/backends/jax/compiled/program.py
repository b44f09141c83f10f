"""The optimized program of a compiled step, read from XLA's dump, and where its instructions come from in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tightfit.trace import Phase

MODULE = re.compile(r"HloModule ([^\s,]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"  (?:ROOT )?%?(\S+) = (.*)")
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
PASSES_ON = {"async-done", "bitcast", "convert", "copy", "reshape", "transpose"}
"""Instructions that hand on as many elements as they are given."""
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

    operands: the instructions whose results it takes, which `names` names. text: all behind its results. root: whether
    it gives its computation's result. body: the instructions of a fusion, or those that a loop runs, by name.
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
        """Whether all that a kernel gives is written into slices of larger arrays, as a loop stacks what it keeps."""
        given = [each for each in self.body.values() if each.root] if self.body else [self]
        while given and all(each.code in PASSES_ON or each.code == "tuple" for each in given) and self.body:
            given = [each for last in given for each in last.operands[: None if last.code == "tuple" else 1]]
        return bool(given) and all(each.code == STACKING for each in given)

    def origin(self, loop: str) -> str:
        """JAX's name for what a kernel computes. One that stacks arrays, or that XLA put in, is named by what is fused
        into it, by its operands, or by its loop. loop: the name of its loop."""
        own = self.op_name
        if own and not self.stacks:
            return own
        named = _fullest([own, *(each.op_name for each in self.body.values() if each.code != STACKING)])
        if not scope(named) or named == own:
            named = _fullest([named, *(each.op_name for each in self.operands)])
        return named or loop


@dataclass
class Program:
    """name: XLA's of the module. computations: the instructions of each, by name, in the order in which they run."""

    name: str = ""
    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)

    def called(self, text: str) -> Mapping[str, Instruction]:
        """The instructions that an instruction with this text fuses or runs."""
        found = INSIDE.search(text)
        return self.computations.get(found[1], {}) if found else {}


def read_program(text: str) -> Program:
    """The program in the text of XLA's dump after its optimizations."""
    program, lines = Program(), dict[str, Instruction]()
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := MODULE.match(line):
                program.name = found[1]
            elif found := COMPUTATION.match(line):
                lines = program.computations.setdefault(found[2], {})
                program.entry = found[2] if found[1] else program.entry
        elif found := INSTRUCTION.match(line):
            lines[found[1]] = _instruction(found[1], found[2], line.startswith("  ROOT"))
    for lines in program.computations.values():
        lines.update({name: _fused(program, each) for name, each in lines.items() if each.code == "async-start"})
        lines.update({name: _part(lines, name) for each in [*lines.values()] for name in each.names if "#" in name})
        for each in lines.values():
            each.operands = [lines[name] for name in each.names if name in lines]
            each.body = program.called(each.text)
    return program


def phase_of(op_name: str) -> Phase:
    """The part of the step that an instruction comes from, by JAX's name for it."""
    if "/optimizer" in op_name:
        return Phase.OPTIMIZER
    if RECOMPUTED in op_name:
        return Phase.RECOMPUTE
    return Phase.BACKWARD if "transpose(" in op_name or "/accumulation" in op_name else Phase.FORWARD


def scope(op_name: str) -> str:
    """The named scopes of an instruction, dotted, without JAX's own transformations and the operation itself."""
    parts = []
    for part in op_name.split("/")[:-1]:
        while found := WRAPPED.match(part):
            part = found[1]
        if part and "<locals>" not in part and "->" not in part and not WRAPPERS.match(part):
            parts.append(part)
    return ".".join(parts)


def array_of(dtype: str, shape: str) -> Array:
    """An array from its text, such as `f32` and `2,3`."""
    return DTYPES.get(dtype, dtype), tuple(int(length) for length in shape.split(",") if length)


def _fullest(names: Iterable[str]) -> str:
    """The name with the longest scope; of several the first."""
    return max(names, key=lambda name: (len(scope(name)), bool(name)), default="")


def _part(lines: dict[str, Instruction], name: str) -> Instruction:
    """One of an instruction's results, as the instruction that JAX 0.10 has XLA write for it."""
    whole, _, index = name.partition("#")
    results = lines[whole].results[int(index) :][:1] if whole in lines else []
    return Instruction(name, "get-tuple-element", results, [whole], f"get-tuple-element(%{whole}), index={index}")


def _fused(program: Program, start: Instruction) -> Instruction:
    """A start of asynchronous work as the one fusion that it wraps; unchanged where it wraps none."""
    fusion = next((each for each in program.called(start.text).values() if each.root and each.code == "fusion"), None)
    if fusion is None:
        return start
    text = fusion.text if fusion.op_name else f'{fusion.text}, metadata={{op_name="{start.op_name}"}}'
    return Instruction(start.name, fusion.code, fusion.results, start.names, text, start.root)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """text: `f32[2,3]{1,0} add(%a, %b), ...`; several results stand in brackets."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    results, rest = text[:end], text[end + 1 :]
    code, _, behind = rest.partition("(")
    names = OPERAND.findall(behind[: _closing(f"({behind}", 0)])
    return Instruction(name, code, [array_of(*found) for found in ARRAY.findall(results)], names, rest, root)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return len(text) - 1
