"""Identify the version of a function, to decide whether its recorded deliverables still hold.

Also finds the function behind partials, bound methods and decorators.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
import warnings
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import ref

from meshpoint.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

_MAX_DECIMAL_BITS = 2000
"""About 600 digits, the lowest limit that Python can be set to."""
_VERSION_ATTRIBUTE = "__meshpoint_version__"
_version_cache: dict[int, tuple[ref[types.CodeType], str]] = {}


def subtask(*, version: str) -> Callable[[F], F]:
    """Give a function an explicit version.

    Its recorded deliverables stay valid until the version changes, even if its code does.

    Raises:
        ConfigurationError: The version is empty, or the callable takes no attributes (a builtin, a
            bound method).
    """
    if not version:
        raise ConfigurationError("subtask", "the version is empty", 'write @subtask(version="1")')

    def decorate(function: F) -> F:
        try:
            setattr(function, _VERSION_ATTRIBUTE, version)
        except AttributeError as error:
            problem = f"{function!r} cannot be marked with a version"
            raise ConfigurationError("subtask", problem, "apply @subtask(...) to a def") from error
        return function

    return decorate


def version_of(function: Callable[..., Any]) -> str:
    """Return an identifier of the code of `function`, the same in every process.

    It starts with `v:` (explicit), `src:`, `code:` or `name:`.

    `src:` is a digest of the syntax tree of the source. Layout, comments and docstrings do not
    count; decorators, defaults and annotations do; called functions do not (`dependencies` adds
    them). The tree is dumped by this module, because the output of `ast.dump` and `ast.unparse`
    differs between minor versions of Python.

    The file may have been edited since it was imported. So its text is used only if compiling it
    gives the loaded bytecode, at any place in the file. Decorators, defaults and annotations are
    not part of that bytecode and have to be trusted. A lambda, or a function without such a text
    (typed into a shell, edited, rewritten on import), gets `code:`, a digest of its bytecode. That
    digest differs under another Python version, or once the text is available again: the subtask
    then runs again, which costs time but is never wrong. Classes, builtins and C functions get
    `name:`.
    """
    explicit = explicit_version(function)
    if explicit is not None:
        return explicit
    inner = unwrap_once(function)
    if inner is not None:
        return version_of(inner)
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return _code_version(code, getattr(function, "__globals__", {}))
    target = function if hasattr(function, "__qualname__") else type(function)
    owner = getattr(target, "__objclass__", target)  # a method of a builtin type has no module
    return f"name:{owner.__module__}.{target.__qualname__}"


def explicit_version(function: Callable[..., Any]) -> str | None:
    """Return the version that `subtask` has set; `None` without one."""
    explicit = getattr(function, _VERSION_ATTRIBUTE, None)
    return f"v:{explicit}" if isinstance(explicit, str) else None


def _code_version(code: types.CodeType, module: dict[str, Any]) -> str:
    # By identity: equal code objects may come from source with different decorators.
    key = id(code)
    if key not in _version_cache:
        version = _source_version(code, module) or f"code:{_code_digest(code)}"
        _version_cache[key] = ref(code, lambda _: _version_cache.pop(key, None)), version
    return _version_cache[key][1]


def _source_version(code: types.CodeType, module: dict[str, Any]) -> str | None:
    try:
        node = None if code.co_name == "<lambda>" else _find_definition(code, module)
        return None if node is None else f"src:{digest_text(dump_tree(node))}"
    except RecursionError:  # a sum of a thousand terms
        return None


def _find_definition(code: types.CodeType, module: dict[str, Any]) -> ast.AST | None:
    """Return the definition that compiles to `code`; `None` if missing or ambiguous."""
    text = "".join(
        linecache.getlines(code.co_filename, module)
    )  # maybe cached by an earlier traceback, and still correct
    found = _find_definition_in(text, code)
    if found is None:
        linecache.checkcache(code.co_filename)
        current_text = "".join(linecache.getlines(code.co_filename, module))
        found = None if current_text == text else _find_definition_in(current_text, code)
    return found


def _find_definition_in(text: str, code: types.CodeType) -> ast.AST | None:
    parsed = parse_module(text, code.co_filename)
    if parsed is None:
        return None
    tree, compiled = parsed
    digest = _code_digest(code)
    lines = [
        each.co_firstlineno
        for each in nested_code(compiled)
        if each.co_qualname == code.co_qualname and _code_digest(each) == digest
    ]
    line = (
        code.co_firstlineno
        if code.co_firstlineno in lines
        else lines[0]
        if len(lines) == 1
        else None
    )
    return (
        next((node for node in ast.walk(tree) if _first_line(node, code.co_name) == line), None)
        if line
        else None
    )


@functools.lru_cache(maxsize=16)
def parse_module(text: str, filename: str) -> tuple[ast.Module, types.CodeType] | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, filename)
            return tree, compile(tree, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError):  # too deep for the parser
        return None


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from nested_code(constant)


def _first_line(node: ast.AST, name: str) -> int | None:
    """Return the line on which code of that name begins: the line of its first decorator."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
        return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return None


def dump_tree(node: Any) -> str:
    """Serialize a syntax tree without docstrings and empty fields.

    Fields that a later Python adds are empty by default, so they do not change the result.
    """
    if isinstance(node, list):
        return f"[{','.join(map(dump_tree, node))}]"
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__}:{constant_repr(node)}"
    fields = {
        name: field
        for name, field in _normalized_fields(node).items()
        if field not in (None, []) and name != "ctx"
    }
    dumped = ",".join(f"{name}={dump_tree(field)}" for name, field in sorted(fields.items()))
    return f"{type(node).__name__}({dumped})"


def _normalized_fields(node: ast.AST) -> dict[str, Any]:
    fields = dict(ast.iter_fields(node))
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if (
            ast.get_docstring(node) is not None
        ):
            fields["body"] = node.body[1:] or [ast.Pass()]
        case ast.JoinedStr():  # some Python versions put empty strings between its parts
            fields["values"] = [part for part in node.values if not _is_empty(part)]
        case ast.FormattedValue(format_spec=ast.JoinedStr(values=spec)) if all(
            map(_is_empty, spec)
        ):
            fields["format_spec"] = None
    return fields


def _is_empty(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value == ""


def _code_digest(code: types.CodeType) -> str:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [_constant_text(each) for each in code.co_consts]
    return digest_text(
        repr(
            (
                code.co_code,
                constants,
                names,
                code.co_flags,
                code.co_argcount,
                code.co_kwonlyargcount,
            )
        )
    )


def _constant_text(value: Any) -> str:
    match value:
        case types.CodeType():
            return f"code:{value.co_name}:{_code_digest(value)}"
        case tuple():
            return f"({','.join(map(_constant_text, value))})"
        case frozenset():  # its order depends on hashes
            return f"{{{','.join(sorted(map(_constant_text, value)))}}}"
    return f"{type(value).__name__}:{constant_repr(value)}"


def constant_repr(value: object) -> str:
    """Return `repr(value)`, but big integers in hex: Python limits their decimal digits."""
    is_big = isinstance(value, int) and value.bit_length() > _MAX_DECIMAL_BITS
    return f"{value:x}" if is_big else repr(value)


def digest_text(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def unwrap_once(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what `function` wraps by one layer; `None` if it wraps nothing.

    A layer is a partial, a bound method, `functools.wraps` or an object with `__call__`.
    """
    match function:
        case functools.partial():
            return function.func
        case types.MethodType():
            return function.__func__
        case type():
            return None
    wrapped: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        return wrapped
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return call if isinstance(call, types.FunctionType) else None


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the innermost function."""
    inner = unwrap_once(function)
    return function if inner is None else unwrap(inner)


def closure_variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the closure variables of `function` that are assigned already."""
    inner = unwrap(function)
    if isinstance(inner, types.FunctionType):
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue
