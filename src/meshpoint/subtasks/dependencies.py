"""Identify a function together with what it uses of its own module.

An edit of a helper or a constant can change what a subtask returns, as an edit of its function
can. So those in the function's module count as follows:

- Functions, methods and the layers of decorators count by their code, as `version_of` describes.
  Methods of the function's own class count if the function mentions their name. What they use
  counts too. Functions may call each other recursively.
- Classes count by their source, with everything they mention.
- Constants count *as written*: by the statements at the top of the module that assign or change
  the name. What happens to them at run time does not count: neither a cache that fills nor another
  value of an environment variable. Pass such a value as an argument. No value's `__hash__` or
  `__repr__` is called.
- Modules do not count, and neither do names imported from them. A function with an explicit
  version covers everything that it uses.

The text of the module may be newer than the loaded module. Functions are checked against their
bytecode, and simple constants against their values. In a module without text, functions count, and
constants that are plain data count by value.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

from meshpoint.model.subtasks import ALL_USES, COMPUTED_VERSIONS, USES
from meshpoint.subtasks.inputs import try_digest
from meshpoint.subtasks.module_source import ModuleSource, read_module
from meshpoint.subtasks.versions import (
    digest_text,
    explicit_version,
    nested_code,
    unwrap_once,
    version_of,
)

_MAX_NAMES = 12
"""Maximum names in a version. More are digested together, so that records stay small."""
_DIGEST_LENGTH = 8
_MAX_LAYERS = 50
"""Maximum wrappers to follow, because an object may claim to wrap others endlessly."""


def version_with_uses(function: Callable[..., Any]) -> str:
    """Return `version_of(function)`, and digests of what it uses of its module, by name."""
    own = version_of(function)
    if not own.startswith(COMPUTED_VERSIONS):
        return own
    uses = _find_uses(function)
    if len(uses) > _MAX_NAMES:
        uses = {ALL_USES: digest_text(repr(sorted(uses.items())))}
    listed = (f"{name}={digest[:_DIGEST_LENGTH]}" for name, digest in sorted(uses.items()))
    return f"{own}{USES}{' '.join(listed)}"


def _find_uses(function: Callable[..., Any]) -> dict[str, str]:
    *_, inner = _layers(function)
    if not isinstance(inner, types.FunctionType):
        return {}
    uses = _Uses(inner.__globals__, inner.__code__.co_filename)
    uses.add_root(function)
    return uses.digests


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield `function` and everything it wraps, the innermost last."""
    layer: Callable[..., Any] | None = function
    for _ in range(_MAX_LAYERS):
        if layer is None:
            return
        yield layer
        layer = unwrap_once(layer)


def _class_of(function: Callable[..., Any]) -> type | None:
    """Return the class of a bound method's object."""
    bound = next((each for each in _layers(function) if isinstance(each, types.MethodType)), None)
    owner = None if bound is None else bound.__self__
    return owner if owner is None or isinstance(owner, type) else type(owner)


class _Uses:
    """Collects digests of what a function uses of `module`, directly or indirectly.

    What remains to be looked at is queued, because a chain of uses may be longer than the stack.
    """

    def __init__(self, module: dict[str, Any], filename: str) -> None:
        self._module, self._filename = module, filename
        self._source = read_module(filename, module)
        self._seen: set[object] = set()
        self._queue: deque[Callable[[], None]] = deque()
        self.digests: dict[str, str] = {}

    def add_root(self, function: Callable[..., Any]) -> None:
        """Add everything that `function` uses, but not its own code."""
        self._add_function(function, _class_of(function), is_root=True)
        while self._queue:
            self._queue.popleft()()

    def _queue_function(self, function: Callable[..., Any], owner: type | None) -> None:
        self._queue.append(functools.partial(self._add_function, function, owner))

    def _queue_globals(self, names: Iterable[str]) -> None:
        self._queue.extend(functools.partial(self._add_global, name) for name in names)

    def _add_function(
        self, function: Callable[..., Any], owner: type | None, *, is_root: bool = False
    ) -> None:
        """Add the layers of `function` in this module, and what they use."""
        layers = list(_layers(function))
        for layer in layers:
            if not isinstance(layer, types.FunctionType) or id(layer) in self._seen:
                continue
            self._seen.add(id(layer))
            if layer.__globals__ is not self._module:
                continue
            if not (is_root and layer is layers[-1]):
                self._add(layer.__code__.co_qualname, _own_version(layer))
            if explicit_version(layer) is not None:
                return
            self._add_uses_of_code(layer, owner or self._defining_class(layer))

    def _add(self, name: str, text: str) -> None:
        # Two functions may share a name, such as closures of one factory.
        self.digests[name] = digest_text(self.digests.get(name, "") + text)

    def _add_uses_of_code(self, function: types.FunctionType, owner: type | None) -> None:
        self._queue_globals(_global_names(function.__code__))
        for cell in function.__closure__ or ():
            try:
                self._add_value(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        if owner is not None:
            for name in _attribute_names(function.__code__):
                self._add_member(owner, name)

    def _add_global(self, name: str) -> None:
        if name in self._seen or name not in self._module:
            return
        self._seen.add(name)
        value = self._module[name]
        if isinstance(value, types.ModuleType):
            return
        self._add_value(value)
        if self._source is None:
            if not callable(value) and (digest := try_digest(value)) is not None:
                self._add(name, digest)
        elif statements := self._source.statements.get(name):
            is_rebound = name in self._source.rebound
            digest = self._source.digest_constant(statements, value, is_rebound=is_rebound)
            self._add(name, digest)
            self._add_names_in(self._source, statements)

    def _add_value(self, value: Any) -> None:
        if isinstance(value, type):
            if value.__module__ == self._module.get("__name__"):
                self._add_class(value)
        elif _is_function(value):
            self._queue_function(value, _class_of(value))

    def _add_class(self, class_: type) -> None:
        if id(class_) in self._seen:
            return
        self._seen.add(id(class_))
        methods = [each for each in map(_plain_function, vars(class_).values()) if each]
        own = [each for each in methods if each.__code__.co_filename == self._filename]
        source = self._source
        node = None if source is None else source.classes.get(class_.__qualname__)
        is_current = all(not version_of(each).startswith("code:") for each in own)
        if source is not None and node is not None and is_current:
            self._add(class_.__qualname__, source.digest(node))
            self._add_names_in(source, [node])
        else:
            for method in own:
                self._queue_function(method, class_)

    def _add_member(self, owner: type, name: str) -> None:
        """Add an attribute of a class of this module that a method mentions."""
        for class_ in owner.__mro__:
            if name not in vars(class_):
                continue
            if class_.__module__ == self._module.get("__name__"):
                member = vars(class_)[name]
                if (function := _plain_function(member)) is not None:
                    self._queue_function(function, owner)
                else:
                    self._add_class_constant(class_, name, member)
            return

    def _add_class_constant(self, class_: type, name: str, value: Any) -> None:
        label = f"{class_.__qualname__}.{name}"
        if label in self._seen:
            return
        self._seen.add(label)
        source = self._source
        node = None if source is None else source.classes.get(class_.__qualname__)
        statements = [] if source is None or node is None else source.of_class(node).get(name, [])
        if source is not None and statements:
            self._add(label, source.digest_constant(statements, value))
            self._add_names_in(source, statements)
        elif (digest := try_digest(value)) is not None:
            self._add(label, digest)

    def _add_names_in(self, source: ModuleSource, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._queue_globals(source.names(statement))

    def _defining_class(self, function: types.FunctionType) -> type | None:
        """Return the class that defines `function`, if it can be found by name in the module."""
        *path, _ = function.__code__.co_qualname.split(".")
        found: Any = self._module.get(path[0]) if path else None
        for name in path[1:]:
            found = vars(found).get(name) if isinstance(found, type) else None
        return found if isinstance(found, type) else None


def _own_version(function: types.FunctionType) -> str:
    """Return the version of this layer itself, without what it wraps."""
    explicit = explicit_version(function)
    return explicit if explicit is not None else version_of(_without_wrapped(function))


def _without_wrapped(function: types.FunctionType) -> types.FunctionType:
    if not hasattr(function, "__wrapped__"):
        return function
    return types.FunctionType(
        function.__code__, function.__globals__, closure=function.__closure__
    )


def _is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Whether `value` is a function or wraps one. Does not run code of `value`."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return True
    return callable(value) and inspect.getattr_static(value, "__wrapped__", None) is not None


def _plain_function(member: object) -> types.FunctionType | None:
    """Return the function behind a member of a class."""
    match member:
        case staticmethod() | classmethod():
            member = member.__func__
        case property():
            member = member.fget
        case functools.cached_property():
            member = member.func
    if _is_function(member):
        *_, member = _layers(member)
    return member if isinstance(member, types.FunctionType) else None


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that `code`, and code inside it, reads from its module or the builtins."""
    return tuple(
        dict.fromkeys(
            instruction.argval
            for each in (code, *nested_code(code))
            for instruction in dis.get_instructions(_without_constants(each))
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
        )
    )


def _without_constants(code: types.CodeType) -> types.CodeType:
    """Return `code` without constants, which `dis` would print: big integers have no `repr`."""
    return code.replace(co_consts=(None,) * len(code.co_consts))


def _attribute_names(code: types.CodeType) -> list[str]:
    return [*dict.fromkeys(name for each in (code, *nested_code(code)) for name in each.co_names)]
