"""Branch coverage of message handling: branches from the source, counts from live replicas."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

MODULES = (
    "meshpoint.engine.parsing",
    "meshpoint.engine.claim",
    "meshpoint.engine.cancels",
    "meshpoint.engine.refusals",
    "meshpoint.engine.senders",
    "meshpoint.engine.responses",
    "meshpoint.engine.throttle",
    "meshpoint.engine.requests",
    "meshpoint.engine.request_answers",
    "meshpoint.engine.attaches",
    "meshpoint.engine.completions",
    "meshpoint.engine.signals",
    "meshpoint.engine.status_queries",
    "meshpoint.engine.unknown_tasks",
)
NOT_CHOSEN_BY_MESSAGES = {
    *(
        ("meshpoint.engine.claim", name)
        for name in ("rescue_expired", "release_unread", "acquire_parked", "acquire_overdue")
    ),
    ("meshpoint.engine.request_answers", "_look_up_if_available"),
}
"""Functions of these modules that only the sweeper calls, for work that time alone makes due, or
whose branches depend only on the configuration and the state of the database."""


@dataclass(frozen=True, order=True)
class Branch:
    """One branch: `text` is the text of its first line, `line` its line number."""

    module: str
    function: str
    text: str
    line: int

    @property
    def name(self) -> str:
        """Name for reports."""
        return f"{self.module.removeprefix('meshpoint.')}.{self.function}: {self.text}"


@cache
def branches(modules: tuple[str, ...] = MODULES) -> list[Branch]:
    """Every `raise`, `return`, `case`, `except` and `if` body of `modules`."""
    return [
        branch
        for name in modules
        for branch in _branches_of(importlib.import_module(name))
        if (branch.module, branch.function) not in NOT_CHOSEN_BY_MESSAGES
    ]


def _branches_of(module: ModuleType) -> Iterator[Branch]:
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

    found_branches = dict[tuple[str, int], Branch]()
    for branch in walk(ast.parse(source), ""):
        found_branches.setdefault((branch.function, branch.line), branch)
    yield from found_branches.values()


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


class BranchCounter:
    """Counts how often the branches of `modules` are taken.

    It replaces the code of their functions by the same code with a count in front of each branch.
    Unlike a trace function, this slows down no other code.
    """

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        self._modules = modules
        self.counts: Counter[tuple[str, int]] = Counter()

    def start(self) -> None:
        """Count in every function of the modules, including functions defined later."""
        # an exact type test runs no code of the objects
        functions = [found for found in gc.get_objects() if type(found) is FunctionType]
        for module in map(importlib.import_module, self._modules):
            vars(module)[_COUNT] = partial(self._count, module.__name__)
            instrumented = _instrumented_functions(module)
            for function in functions:
                code = function.__code__
                if code.co_filename == module.__file__ and code.co_name != "<lambda>":
                    function.__code__ = instrumented[code.co_qualname, code.co_firstlineno]

    def _count(self, module: str, line: int) -> None:
        self.counts[module, line] += 1


_COUNT = "__count_branch__"


def _instrumented_functions(module: ModuleType) -> dict[tuple[str, int], CodeType]:
    path = inspect.getfile(module)
    tree = _Instrumenter({branch.line for branch in _branches_of(module)}).visit(
        ast.parse(Path(path).read_text())
    )
    return {
        (code.co_qualname, code.co_firstlineno): code
        for code in _nested_code(compile(tree, path, "exec"))
    }


class _Instrumenter(ast.NodeTransformer):
    """Inserts a count before each statement that begins on a line in `lines`."""

    def __init__(self, lines: set[int]) -> None:
        self._lines = lines

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                setattr(
                    node,
                    name,
                    [each for statement in statements for each in self._with_count(statement)],
                )
        return node

    def _with_count(self, statement: ast.stmt) -> list[ast.stmt]:
        if statement.lineno not in self._lines:
            return [statement]
        (count,) = ast.parse(f"{_COUNT}({statement.lineno})").body
        for node in ast.walk(count):
            ast.copy_location(node, statement)
        return [count, statement]


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_code(constant)
