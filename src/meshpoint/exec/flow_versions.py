"""The versions of a flow that the attempts of a session ran.

A flow is the source of the modules with its agents. Each version is a folder with these files, so
that ordinary tools can show and compare them: `sessions/<id>/v1/flow.py`, `v2/flow.py`, …
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from meshpoint.errors import ConfigurationError
from meshpoint.exec.session import validate_session_id

FlowSources: TypeAlias = Mapping[str, str]
"""The text of each file, by path relative to the root of its package."""

_OPTION = "--into"
_OWNER_ONLY = 0o700
_FOLDER_NAME = re.compile(r"v([1-9][0-9]{0,8})")


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
