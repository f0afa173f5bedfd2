"""Branch coverage of message handling: branches are listed from the source and counted while a replica runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

MODULES = (
    "meshpoint.lifecycle.receive",
    "meshpoint.lifecycle.claim",
    "meshpoint.lifecycle.cancel",
    "meshpoint.lifecycle.refuse",
    "meshpoint.lifecycle.senders",
    "meshpoint.worker.letters",
    "meshpoint.worker.requests",
)


@dataclass(frozen=True, order=True)
class Branch:
    """One branch: `what` is the text of its first line, `line` its line number."""

    module: str
    function: str
    what: str
    line: int

    @property
    def name(self) -> str:
        """The name for reports."""
        return f"{self.module.removeprefix('meshpoint.')}.{self.function}: {self.what}"


def branches(modules: tuple[str, ...] = MODULES) -> list[Branch]:
    """Every `raise`, `return`, `case`, `except` and `if` body of `modules`."""
    return [branch for name in modules for branch in _of(importlib.import_module(name))]


def _of(module: ModuleType) -> Iterator[Branch]:
    source = Path(inspect.getfile(module)).read_text()
    lines = source.splitlines()

    def walk(node: ast.AST, function: str) -> Iterator[Branch]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".strip(".")
            elif function:
                for statement, prefix in _first_statements(child):
                    text = f"{prefix}{lines[statement.lineno - 1].strip()}"
                    yield Branch(module.__name__, function, text, statement.lineno)
            yield from walk(child, inner)

    found = dict[tuple[str, int], Branch]()
    for branch in walk(ast.parse(source), ""):
        found.setdefault((branch.function, branch.line), branch)
    yield from found.values()


def _first_statements(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    match node:
        case ast.Raise() | ast.Return():
            yield node, ""
        case ast.match_case():
            yield node.body[0], f"case {ast.unparse(node.pattern)}: "
        case ast.ExceptHandler():
            yield node.body[0], f"except {ast.unparse(node.type) if node.type else ''}: "
        case ast.If():
            yield node.body[0], f"if {ast.unparse(node.test)}: "
            if node.orelse and not isinstance(node.orelse[0], ast.If):
                yield node.orelse[0], f"not {ast.unparse(node.test)}: "


class Counting:
    """Counts the lines of `MODULES` in this thread. Costs a call for each call of any function."""

    def __init__(self) -> None:
        files = {inspect.getfile(importlib.import_module(name)): name for name in MODULES}
        self._files = files
        self._known: dict[CodeType, str | None] = {}
        self.lines: Counter[tuple[str, int]] = Counter()

    def start(self) -> None:
        """Start counting."""
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        try:
            module = self._known[code]
        except KeyError:
            module = self._known[code] = self._files.get(code.co_filename)
        return None if module is None else self._local(module)

    def _local(self, module: str) -> Any:
        lines = self.lines

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines[module, frame.f_lineno] += 1
            return count

        return count
