"""Count the functions of Meshpoint that one warm message without a pause passes in a replica.

Run with a version's tree on the path. Prints JSON: the number of distinct functions under each
part of the package, without the client's, and the CPU time of a message in seconds, with the
client's. The script uses only the public API.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import meshpoint
from meshpoint import TaskExecutionContext, agent
from meshpoint.local import local_mesh

_PACKAGE = Path(meshpoint.__file__).parent
_CLIENT = (f"{_PACKAGE / 'client'}/", str(_PACKAGE / "client.py"))
_WARM_UP, _RECORDED, _TIMED = 20, 5, 1000


@agent("echo")
async def echo(ctx: TaskExecutionContext, request: int) -> int:
    """Return the request."""
    return request


class CallRecorder:
    """A profile function that records each function called in a replica, while it is `active`."""

    def __init__(self) -> None:
        self._codes = set[CodeType]()
        self.active = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.active and event == "call" and not _is_called_by_client(frame):
            self._codes.add(frame.f_code)

    def counts(self) -> dict[str, int]:
        """Number of recorded functions under each part of the package."""
        paths = [Path(code.co_filename) for code in self._codes]
        return Counter(
            path.relative_to(_PACKAGE).parts[0] for path in paths if path.is_relative_to(_PACKAGE)
        )


def _is_called_by_client(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_CLIENT):
            return True
        frame = frame.f_back
    return False


async def _count() -> dict[str, int]:
    recorder = CallRecorder()
    threading.setprofile(recorder)  # for the threads of the stores
    async with local_mesh(echo) as mesh:
        call = _call_of(mesh)
        for number in range(_WARM_UP):
            await call("echo", number)
        sys.setprofile(recorder)
        recorder.active = True
        # Each request is settled while the next one runs.
        for number in range(_RECORDED):
            await call("echo", number)
        recorder.active = False
        sys.setprofile(None)
    threading.setprofile(None)
    return recorder.counts()


async def _time() -> float:
    async with local_mesh(echo) as mesh:
        call = _call_of(mesh)
        for number in range(_WARM_UP):
            await call("echo", number)
        started_at = time.process_time()
        for number in range(_TIMED):
            await call("echo", number)
        return (time.process_time() - started_at) / _TIMED


def _call_of(mesh: Any) -> Callable[[str, int], Awaitable[int]]:
    call: Callable[[str, int], Awaitable[int]]
    call = getattr(mesh, "call", None) or mesh.ask  # earlier releases
    return call


async def main() -> tuple[dict[str, int], float]:
    """Return the counts and the CPU seconds for a message after others."""
    return await _count(), await _time()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
