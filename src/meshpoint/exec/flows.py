"""Flows: their source, which function each step calls, and the versions that a session ran.

A flow is the source of the modules with its agents. Each version is a folder with these files, so
that ordinary tools can show and compare them: `sessions/<id>/v1/flow.py`, `v2/flow.py`, …
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from meshpoint.agents.function import FunctionAgent
from meshpoint.errors import ConfigurationError
from meshpoint.exec.session import validate_session_id
from meshpoint.ports.agent import DurableAgent

FlowSources: TypeAlias = Mapping[str, str]
"""The text of each file, by path relative to the root of its package."""

_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of a file. A note is kept instead of a larger one."""
_OPTION = "--into"
_OWNER_ONLY = 0o700
_FOLDER_NAME = re.compile(r"v([1-9][0-9]{0,8})")


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


class FlowVersions:
    """The versions of one session, numbered from 1.

    Raises:
        ConfigurationError: `session_id` is not a valid id.
    """

    def __init__(self, sessions_folder: Path, session_id: str) -> None:
        self._folder = sessions_folder / validate_session_id(session_id)

    def numbers(self) -> list[int]:
        """Return the numbers of the versions, in order."""
        try:
            matches = [_FOLDER_NAME.fullmatch(entry.name) for entry in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in matches if match is not None)

    def read(self, number: int) -> dict[str, str]:
        """Return the files of a version. Empty if there is no such version."""
        root = self._folder / f"v{number}"
        if not _FOLDER_NAME.fullmatch(root.name):
            return {}
        return {
            file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
            for file in sorted(root.rglob("*"))
            if file.is_file()
        }

    def record(self, sources: FlowSources) -> int | None:
        """Keep `sources` as a new version unless a version equals them. Returns its number.

        Returns `None` if there is nothing to keep.
        """
        if not sources:
            return None
        numbers = self.numbers()
        for number in reversed(numbers):
            if self.read(number) == dict(sources):
                return number
        last = next(reversed(numbers), 0)
        self._folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
        for name, text in sources.items():
            file = unfinished / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
        os.replace(unfinished, self._folder / f"v{last + 1}")
        return last + 1

    def restore(self, number: int, folder: Path) -> list[str]:
        """Write the files of a version below `folder`. Returns the names of changed files.

        Raises:
            ConfigurationError: A file has content that no version has and that would be lost, or
                it cannot be read or written.
        """
        files = self.read(number)
        try:
            changed = {name: text for name, text in files.items() if _read(folder / name) != text}
            for name in changed:
                self._check_replaceable(name, folder / name)
            for name, text in changed.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
            raise ConfigurationError(_OPTION, problem, "name another folder") from error
        return list(changed)

    def _check_replaceable(self, name: str, file: Path) -> None:
        current = _read(file)
        kept = (self.read(number).get(name) for number in self.numbers())
        if current is not None and current not in kept:
            problem = f"{file} has changes that no version of the session has"
            raise ConfigurationError(_OPTION, problem, "run them in the session, or move the file")

    def delete(self) -> None:
        """Delete all versions. Never follows symbolic links."""
        if self._folder.is_symlink():
            self._folder.unlink(missing_ok=True)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)


def _read(file: Path) -> str | None:
    """Read a file as versions are read; `None` if it does not exist."""
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else None


def diff_sources(
    before: FlowSources, after: FlowSources, before_label: str, after_label: str
) -> Iterator[str]:
    """Yield the lines of a unified diff of two versions."""
    for name in dict.fromkeys([*before, *after]):
        yield from difflib.unified_diff(
            before.get(name, "").splitlines(),
            after.get(name, "").splitlines(),
            f"{before_label}/{name}",
            f"{after_label}/{name}",
            lineterm="",
        )
