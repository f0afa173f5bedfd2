"""Read the source of a flow: its files, and which function each step calls."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshpoint.agents.function import FunctionAgent
from meshpoint.ports.agent import DurableAgent

_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of a file. A note is kept instead of a larger one."""


def agent_module(agent: DurableAgent[Any, Any]) -> str:
    """Return the name of the module with the code of `agent`."""
    code = agent.function if isinstance(agent, FunctionAgent) else type(agent)
    return str(code.__module__)


def read_sources(agents: Iterable[DurableAgent[Any, Any]]) -> dict[str, str]:
    """Read the files of the modules of `agents`. Modules without a file are left out."""
    sources: dict[str, str] = {}
    for name in dict.fromkeys(map(agent_module, agents)):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and (text := _read_text(Path(file))) is not None:
            sources[_relative_name(name, Path(file))] = text
    return sources


def _read_text(file: Path) -> str | None:
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            return f"# {size} bytes, too many to keep\n"
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _relative_name(module: str, file: Path) -> str:
    *packages, name = module.split(".")
    parts = [*packages, name] if file.stem == "__init__" else packages
    return "/".join([*parts, file.name])


class StepFunctions:
    """The functions that an agent's code passes to `ctx.subtask`, found without running it.

    Finds only calls in the agent's module whose step name is a string, an f-string or a constant,
    and whose function can be reached by name from the module, a class or the agent.
    """

    def __init__(self, agent: DurableAgent[Any, Any]) -> None:
        self._agent = agent
        self._module = sys.modules.get(agent_module(agent))
        text = _read_text(Path(getattr(self._module, "__file__", None) or ""))
        self._calls = list(_find_calls(text or ""))

    def find(self, step: str) -> Callable[..., Any] | None:
        """Return the function of a step; `None` if it is unknown before the step runs."""
        found = [
            self._resolve(function)
            for name, function in self._calls
            if (pattern := self._name_pattern(name)) is not None and pattern.fullmatch(step)
        ]
        is_clear = bool(found) and all(each == found[0] for each in found)
        function = found[0] if is_clear else None
        return function if callable(function) else None

    def _name_pattern(self, name: ast.expr) -> re.Pattern[str] | None:
        match name:
            case ast.Constant(value=str() as text):
                return re.compile(re.escape(text))
            case ast.JoinedStr(values=parts):
                texts = (
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*"
                    for part in parts
                )
                return re.compile("".join(texts), re.DOTALL)
            case _:
                value = self._resolve(name)
                return re.compile(re.escape(value)) if isinstance(value, str) else None

    def _resolve(self, expression: ast.expr) -> object:
        """Return what an expression refers to, without calling anything; `None` if unknown."""
        match expression:
            case ast.Name(id="self"):
                return self._agent
            case ast.Name(id=name):
                return vars(self._module).get(name) if self._module is not None else None
            case ast.Attribute(value=value, attr=attribute):
                return _get_member(self._resolve(value), attribute)
            case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=args):
                inner = self._resolve(args[0]) if args else None
                return partial(inner) if callable(inner) else None
        return None


def _get_member(owner: object, name: str) -> object:
    if isinstance(getattr(type(owner), name, None), property):
        return None  # it runs code
    return getattr(owner, name, None)


def _find_calls(text: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the name and the function of each call of a method called `subtask`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="subtask"), args=[name, function, *_]):
                yield name, function
