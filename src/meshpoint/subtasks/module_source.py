"""Find what the text of a module assigns and defines."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshpoint.subtasks.versions import constant_repr, digest_text, dump_tree, parse_module

_SCALARS = (type(None), bool, int, float, str, bytes)
_MAX_CACHED = 256
_cache: dict[str, tuple[list[str], ModuleSource | None]] = {}
"""By file. An entry holds for the list of lines that `linecache` had then, until it loads anew."""


class ModuleSource:
    """What the text of a module defines.

    Attributes:
        statements: The statements that assign or change each name, without those in functions.
        classes: The classes by qualified name.
        rebound: Names that functions assign, with `global`.
    """

    def __init__(self, text: str, tree: ast.Module) -> None:
        self._lines = text.splitlines()
        self._digests: dict[ast.AST, str] = {}
        self._names: dict[ast.AST, tuple[str, ...]] = {}
        self.statements = collect_statements(tree.body)
        self.classes = dict(_collect_classes(tree.body, ""))
        self.rebound = {
            name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
        }

    def of_class(self, node: ast.ClassDef) -> dict[str, list[ast.stmt]]:
        """Return the statements in the body of a class, by name. None if it is nested too deep."""
        try:
            return collect_statements(node.body)
        except RecursionError:
            return {}

    def digest(self, node: ast.stmt) -> str:
        """Return a digest of a statement, without layout, comments and docstrings."""
        if node not in self._digests:
            try:
                text = dump_tree(node)
            except RecursionError:  # a sum of a thousand terms
                text = "\n".join(self._lines[node.lineno - 1 : node.end_lineno])
            self._digests[node] = digest_text(text)
        return self._digests[node]

    def names(self, node: ast.stmt) -> tuple[str, ...]:
        """Return the names that a statement mentions."""
        if node not in self._names:
            walked = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            self._names[node] = tuple(dict.fromkeys(walked))
        return self._names[node]

    def digest_constant(
        self, statements: Sequence[ast.stmt], value: object, *, is_rebound: bool = False
    ) -> str:
        """Return a digest of the statements that make a constant, or else of its value.

        The value counts if it differs from the literal, because the file was then edited after its
        import. Names that functions assign (`is_rebound`) are not compared.
        """
        match statements:
            case [ast.Assign(value=written) | ast.AnnAssign(value=ast.expr() as written)] if (
                isinstance(value, _SCALARS)
                and not is_rebound
                and _is_literal_of(written, value) is False
            ):
                return digest_text(f"{type(value).__name__}:{constant_repr(value)}")
        return digest_text("".join(map(self.digest, statements)))


def read_module(filename: str, module: dict[str, Any]) -> ModuleSource | None:
    """Parse the text of a module; `None` if missing or invalid."""
    lines = linecache.getlines(filename, module)
    cached = _cache.get(filename)
    if cached is not None and cached[0] is lines:
        return cached[1]
    source = _parse("".join(lines), filename)
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[filename] = lines, source
    return source


def _parse(text: str, filename: str) -> ModuleSource | None:
    try:
        parsed = parse_module(text, filename) if text else None
        return None if parsed is None else ModuleSource(text, parsed[0])
    except RecursionError:  # a sum of a thousand terms
        return None


def collect_statements(body: Iterable[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the statements that assign or change each name in the body of a module or class."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _simple_statements(body):
        for name in dict.fromkeys(_changed_names(statement)):
            found.setdefault(name, []).append(statement)
    return found


def _simple_statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a class, also from inside `if`, `try` and `with`.

    Loops are yielded as a whole, definitions and imports not at all.
    """
    for statement in body:
        match statement:
            case ast.If() | ast.Try() | ast.TryStar() | ast.With():
                for part in ("body", "handlers", "orelse", "finalbody"):
                    yield from _simple_statements(getattr(statement, part, ()))
            case ast.Match(cases=cases):
                for case in cases:
                    yield from _simple_statements(case.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.stmt():
                yield statement
            case _:  # an exception handler
                yield from _simple_statements(getattr(statement, "body", ()))


def _changed_names(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Assign(targets=targets):
            yield from _roots(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr()):
            yield from _roots([target])
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=changed))):
            yield from _roots([changed])
        case ast.For(target=target, body=body) | ast.AsyncFor(target=target, body=body):
            yield from _roots([target])
            yield from collect_statements(body)
        case ast.While(body=body):
            yield from collect_statements(body)
        case _ if type(statement).__name__ == "TypeAlias":  # Python 3.12
            yield from _roots([getattr(statement, "name")])  # noqa: B009


def _roots(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        match target:
            case ast.Name(id=name):
                yield name
            case (
                ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value)
            ):
                yield from _roots([value])
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                yield from _roots(elements)


def _collect_classes(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield prefix + statement.name, statement
            yield from _collect_classes(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.If | ast.Try):
            yield from _collect_classes([*statement.body, *statement.orelse], prefix)


def _is_literal_of(written: ast.expr, value: object) -> bool | None:
    """Whether the expression is written as exactly this value; `None` if it is no literal."""
    try:
        literal = ast.literal_eval(written)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return type(literal) is type(value) and constant_repr(literal) == constant_repr(value)
