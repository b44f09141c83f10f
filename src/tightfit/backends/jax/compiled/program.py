"""The optimized program of a compiled step, read from XLA's dump, and what the names in it say of the model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from tightfit.backends.jax.compiled.buffers import ARRAY, DTYPES
from tightfit.trace import Phase

MODULE = re.compile(r"HloModule ([^\s,]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"  (?:ROOT )?%?(\S+) = (.*)")
OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)?)")
"""An operand's name; of an instruction with several results, JAX 0.11 has XLA write which: `%while.1#2`."""
CALLED = re.compile(r"calls=%?([\w.\-]+)")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "uint32": 4, "int64": 8}
RECOMPUTED = "rematted_computation"
"""What JAX names the part of a backward pass that computes the forward pass again."""
WRAPPERS = re.compile(
    r"^(?:jit\(.*\)|while|body|closed_call|eval_jaxpr|checkpoint|remat|cond|rematted_computation|branch_\d+.*)$")
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
    """name: XLA's of the module. computations: the instructions of each, by name, in the order in which they run."""

    name: str = ""
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
            if found := MODULE.match(line):
                program.name = found[1]
            elif found := COMPUTATION.match(line):
                lines = program.computations.setdefault(found[2], {})
                program.entry = found[2] if found[1] else program.entry
        elif found := INSTRUCTION.match(line):
            made = _instruction(found[1], found[2], line.startswith("  ROOT"))
            lines[made.name] = made
    for lines in program.computations.values():
        lines.update({name: _unwrapped(program, each) for name, each in lines.items() if each.code == "async-start"})
        lines.update({name: _part(lines, name) for each in [*lines.values()] for name in each.operands if "#" in name})
    return program


def _part(lines: dict[str, Instruction], name: str) -> Instruction:
    """One of an instruction's results, as the instruction that JAX 0.10 has XLA write for it."""
    whole, _, index = name.partition("#")
    results = lines[whole].results[int(index) :][:1] if whole in lines else []
    return Instruction(name, "get-tuple-element", results, [whole], f"get-tuple-element(%{whole}), index={index}")


def _unwrapped(program: Program, start: Instruction) -> Instruction:
    """What begins beside other kernels, as the one fusion that it is around; as it is where it is around none."""
    found = CALLED.search(start.text)
    around = program.computations.get(found[1], {}) if found else {}
    inside = next((each for each in around.values() if each.root and each.code == "fusion"), None)
    if inside is None:
        return start
    text = inside.text if inside.op_name else f'{inside.text}, metadata={{op_name="{start.op_name}"}}'
    return Instruction(start.name, inside.code, inside.results, start.operands, text, start.root)


def phase_of(op_name: str) -> Phase:
    """The part of the step that an instruction comes from, by the name that JAX gives it."""
    if "/optimizer" in op_name:
        return Phase.OPTIMIZER
    if RECOMPUTED in op_name:
        return Phase.RECOMPUTE
    return Phase.BACKWARD if "transpose(" in op_name or "/accumulation" in op_name else Phase.FORWARD


def scope(op_name: str) -> str:
    """The named scopes of an instruction, dotted, without JAX's own transformations and products and the operation
    itself."""
    parts = []
    for part in op_name.split("/")[:-1]:
        while found := WRAPPED.match(part):
            part = found[1]
        if part and "<locals>" not in part and "->" not in part and not WRAPPERS.match(part):
            parts.append(part)
    return ".".join(parts)


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
