"""Where a kernel comes from in the model, also where XLA put it in itself and JAX's name for it is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from tightfit.backends.jax.compiled.buffers import STACKING
from tightfit.backends.jax.compiled.program import Instruction, Program, scope

INSIDE = re.compile(r"(?:calls|body|to_apply)=%?([\w.\-]+)")
INDEX = re.compile(r"index=(\d+)")
PASSES_ON = {"async-done", "bitcast", "convert", "copy", "reshape", "transpose"}
"""What hands on as many elements as it is given."""
VIEWS = {"async-done", "bitcast", "get-tuple-element"}
"""What makes nothing: another name for what its first operand made."""
FURTHEST = 12
"""Instructions that are gone back through."""


def body_of(program: Program, instruction: Instruction) -> Mapping[str, Instruction]:
    """The instructions that a fusion is made of, or that a loop runs; none of any other."""
    found = INSIDE.search(instruction.text)
    return program.computations.get(found[1], {}) if found else {}


def stacks(program: Program, instruction: Instruction) -> bool:
    """Whether all that a kernel gives is written into slices of larger arrays, as a loop stacks what it keeps."""
    body = body_of(program, instruction)
    if not body:
        return instruction.code == STACKING
    given = [each for each in body.values() if each.root]
    while given and all(each.code in PASSES_ON or each.code == "tuple" for each in given):
        names = [name for each in given for name in (each.operands if each.code == "tuple" else each.operands[:1])]
        given = [body[name] for name in names if name in body]
    return bool(given) and all(each.code == STACKING for each in given)


def origin(program: Program, lines: Mapping[str, Instruction], instruction: Instruction, around: str) -> str:
    """The name that JAX gave what a kernel computes. One that stacks arrays is known by what computed them, one without
    a name by what it is made of, by what it is given, or by the loop that it runs in.

    lines: the instructions beside it. around: the loop's name.
    """
    own = instruction.op_name
    if own and not stacks(program, instruction):
        return own
    inside = (each.op_name for each in body_of(program, instruction).values() if each.code != STACKING)
    named = _fullest([own, *inside])
    if not scope(named) or named == own:
        given = [_maker(program, lines, name, FURTHEST) for name in instruction.operands]
        named = _fullest([named, *given])
    return named or around


def carried(program: Program) -> Iterator[tuple[str, str]]:
    """What a loop takes from turn to turn, as XLA names it outside and inside the loop (`while.1{2}`, `arg.1{2}`), and
    the instruction that makes it anew in each."""
    for lines in program.computations.values():
        for loop in lines.values():
            inside = body_of(program, loop) if loop.code == "while" else {}
            given = next((each for each in inside.values() if each.root), None)
            taken = next((each for each in inside.values() if each.code == "parameter"), None)
            for number, name in enumerate(given.operands if given is not None else ()):
                while name in inside and inside[name].code in VIEWS:
                    name = inside[name].operands[0]
                yield f"{loop.name}{{{number}}}", name
                if taken is not None:
                    yield f"{taken.name}{{{number}}}", name


def _fullest(names: Iterable[str]) -> str:
    """The name that says most of the model; of several the first."""
    return max(names, key=lambda name: (len(scope(name)), bool(name)), default="")


def _maker(program: Program, lines: Mapping[str, Instruction], name: str, further: int) -> str:
    """The name that JAX gave what made a value; of a loop's result, what made that inside."""
    made = lines.get(name)
    if made is None or not further:
        return ""
    if made.code == "get-tuple-element":
        source, index = lines.get(made.operands[0]), INDEX.search(made.text)
        if source is not None and index is not None and source.code in ("while", "tuple"):
            inside = body_of(program, source) if source.code == "while" else lines
            root = source if source.code == "tuple" else next(each for each in inside.values() if each.root)
            if int(index[1]) < len(root.operands):
                return _maker(program, inside, root.operands[int(index[1])], further - 1)
        return ""
    if made.code == "parameter":
        return ""
    if made.code in PASSES_ON and not scope(made.op_name):
        return _maker(program, lines, made.operands[0], further - 1)
    if stacks(program, made):
        return origin(program, lines, made, "")
    return made.op_name
