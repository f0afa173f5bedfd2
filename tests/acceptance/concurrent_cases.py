"""Cases of a test that run concurrently on shared servers: they mostly wait for leases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from meshpoint.model.ids import new_id

from .mesh import Backends

_MAX_CONCURRENT_CASES = 6
_LOOK_AHEAD = 16
"""Cases that may start before their test asks for them."""
_C = TypeVar("_C")
_R = TypeVar("_R")


def selected_parameters(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """The parameters of each test selected in the module of `request`."""
    calls = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.parent is request.node
    ]
    return [call.params for call in calls if call is not None]


def server_urls(
    request: pytest.FixtureRequest, backends: Collection[str]
) -> dict[str, tuple[str, str]]:
    """URLs of broker and database, for each name in `backends` that means servers.

    All cases share them, each in its own namespace.
    """
    urls: dict[str, tuple[str, str]] = {}
    if {"production", "postgresql"}.intersection(backends):
        database = request.getfixturevalue("module_postgres_url")
        urls["postgresql"] = database, database
        if "production" in backends:
            urls["production"] = request.getfixturevalue("rabbit_server").url, database
    return urls


def make_backends(urls: tuple[str, str] | None, folder: Path) -> Backends:
    """Backends for one case, in `folder` if there are no servers."""
    urls = urls or (f"sqlite:///{folder}/broker.db", f"sqlite:///{folder}/tasks.db")
    return Backends(*urls, f"test-{new_id()}", folder)


class ConcurrentCases(Generic[_C, _R]):
    """Runs the case that a test asks for together with the cases after it.

    Parallel workers all know every case and share the tests among themselves, so a case starts
    only shortly before its test.
    """

    def __init__(self, cases: Sequence[_C], run: Callable[[_C], Awaitable[_R]]) -> None:
        self._run = run
        self._cases = cases
        self._tasks: dict[_C, asyncio.Task[_R]] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_CASES)

    async def result(self, case: _C) -> _R:
        """Run `case` and return its result. The next cases start as well."""
        index = self._cases.index(case)
        for each in self._cases[index : index + 1 + _LOOK_AHEAD]:
            if each not in self._tasks:
                self._tasks[each] = asyncio.create_task(self._run_in_turn(each))
        return await self._tasks[case]

    async def _run_in_turn(self, case: _C) -> _R:
        async with self._slots:
            return await self._run(case)

    async def close(self) -> None:
        """Cancel the cases that no test asked for."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
