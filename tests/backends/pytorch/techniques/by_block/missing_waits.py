"""Functions that move tensors without one of their waits, or without one of the points that a copy begins after."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from types import CodeType, ModuleType
from typing import Any, NamedTuple

WAITS = {"wait", "wait_on_host", "wait_event", "synchronize", "wait_for_copies_out", "hold_copies_in",
         "wait_for_offload", "_wait_for_offloads", "_wait_for_arrival", "_free_offloaded_gradients"}
"""Methods that let one stream, or the host, wait."""
KEPT = {"written", "free", "leaving", "arriving", "latest_out", "_hold_in", "_latest", "_begun", "_latest_offloaded",
        "event"}
"""Attributes that keep what is to be waited for."""
POINTS = re.compile(rf"record_event\(\)|\b({'|'.join(KEPT)}|after|out)\b")
"""In an expression for a point, or several."""


class Mutant(NamedTuple):
    """A function, the code that lacks a wait, and the words for it."""

    function: Any
    code: CodeType
    says: str

    def __str__(self) -> str:
        return self.says


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """All of a module's, one for each wait."""
    source, number = inspect.getsource(module), 0
    while True:
        without = _Without(number)
        tree = ast.fix_missing_locations(without.visit(ast.parse(source)))
        if not without.taken:
            return
        name = ".".join(without.inside)
        function = inspect.unwrap(attrgetter(name)(module))
        codes = _codes(compile(tree, str(module.__file__), "exec"))
        yield Mutant(function, next(code for code in codes if code.co_qualname == name), f"{name}: {without.taken}")
        number += 1


class _Without(ast.NodeTransformer):
    """Takes out the wait of a number, counted in the order of the source. taken: its text; "" where there are fewer.
    inside: the names of the class and function that it was in."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.taken = ""
        self.inside: list[str] = []

    def _is_it(self, says: str) -> bool:
        self._left -= 1
        if self._left == -1:
            self.taken = says
        return self._left == -1

    def _visit_inside(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if self.taken:
            return node
        self.inside.append(node.name)
        self.generic_visit(node)
        if not self.taken:
            self.inside.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _visit_inside

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in WAITS and self._is_it(ast.unparse(node)):
            returned = ast.Attribute(called.value, "target", ast.Load()) if called.attr == "wait" else None
            return returned or ast.Constant(None)
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        self.generic_visit(node)
        node.elts = [e for e in node.elts if not (POINTS.search(ast.unparse(e)) and self._is_it(ast.unparse(e)))]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        for place, target in enumerate(node.targets):
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                target.elts = [self._kept(*pair) for pair in zip(target.elts, node.value.elts, strict=True)]
            else:
                node.targets[place] = self._kept(target, node.value)
        return node

    def _kept(self, target: ast.expr, value: ast.expr) -> ast.expr:
        """The target, or another where this mutant forgets a point."""
        kept, nothing = target.value if isinstance(target, ast.Subscript) else target, ("None", "[]", "()")
        keeps = isinstance(kept, ast.Attribute) and kept.attr in KEPT and ast.unparse(value) not in nothing
        taken = keeps and "__init__" not in self.inside and self._is_it(f"{ast.unparse(target)} = {ast.unparse(value)}")
        return ast.Name("_", ast.Store()) if taken else target


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
