"""A store of an earlier release, in a process of its own, as a second replica on the same tables.

The process reads commands as lines of JSON and runs the functions below. So this module only uses
names that the earlier release has too. Each command opens a store, on a clock that the test sets.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import JsonValue

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, encode_outcome
from meshpoint.model.tasks import Resumable, TaskState
from meshpoint.model.transitions import Cancel, Claim, End
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import AGENT, HERE


class EarlierRelease:
    """The process. Close it with `with`."""

    def __init__(self, sources: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": str(sources)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, command: str, *arguments: object, url: str, clock: FakeClock) -> Any:
        """Run a command on the database at `url`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([command, url, clock.now().isoformat(), arguments])
        print(line, file=self._process.stdin, flush=True)
        result, error = json.loads(self._process.stdout.readline())
        assert error is None, error
        return result


async def sweep(store: SqlStore) -> Any:
    """Sweep once without sending, and return the due calls, tasks and messages."""
    expired = await store.expire(HERE, 10, 10)
    acquired = await store.acquire(HERE, 10)
    rescued = await store.rescue(HERE, 10, 10)
    sends = await store.unsent(AGENT, 10)
    return {
        "expired": [each.task_id for each in expired],
        "results": [type(each.join_result).__name__ for each in expired],
        "acquired": [each.run.task_id for each in [*acquired, *rescued]],
        "sends": [f"{type(each).__name__} {getattr(each, 'peer', '')}" for each in sends],
    }


async def send(store: SqlStore) -> Any:
    """Send due calls and record them as sent. Returns the ids of the calls."""
    sends = await store.unsent(AGENT, 10)
    await store.confirm_sent(sends)
    return [str(getattr(each, "sub_task_id", each.task_id)) for each in sends]


async def claim(store: SqlStore, task_id: str, sub_task_id: str, value: JsonValue) -> Any:
    """Record a response: a value, or a failure if it is `None`. Returns the result."""
    outcome: Outcome = Failed(FailureKind.ERROR, "broken") if value is None else Ok(value)
    command = Claim(RunId(new_id()), TaskId(task_id), TaskId(sub_task_id), outcome, None)
    (result,) = await store.claim([command], HERE, 1)
    return {"result": type(result).__name__, "outcomes": _outcomes(getattr(result, "task", None))}


async def acquire(store: SqlStore) -> Any:
    """Acquire a ready task. Returns its outcomes, as the code of its agent receives them."""
    (task,) = await store.acquire(HERE, 10)
    return _outcomes(task)


async def end(store: SqlStore) -> Any:
    """Acquire a ready task, and end it."""
    (task,) = await store.acquire(HERE, 10)
    (result,) = await store.end([End(task.run, TaskState.COMPLETED, b"done")])
    return type(result).__name__


async def cancel(store: SqlStore, task_id: str) -> Any:
    """Cancel a task."""
    command = Cancel(TaskId(task_id), AGENT, RunId(new_id()), b"cancelled")
    (result,) = await store.cancel([command])
    return type(result).__name__


async def purge(store: SqlStore) -> Any:
    """Delete expired rows."""
    return await store.purge(AGENT, 10)


def _outcomes(task: Resumable | None) -> dict[str, str]:
    outcomes = () if task is None else task.outcomes
    return {call_id: encode_outcome(outcome).decode() for call_id, _, outcome in outcomes}


_COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    each.__name__: each for each in (sweep, send, claim, acquire, end, cancel, purge)
}


async def _run_commands() -> None:
    for line in sys.stdin:
        command, url, now, arguments = json.loads(line)
        clock = FakeClock(datetime.fromisoformat(now))
        store = SqlStore(url, namespace="test", clock=clock)
        result = error = None
        try:
            await store.open()
            result = await _COMMANDS[command](store, *arguments)
        except Exception:
            error = traceback.format_exc()
        finally:
            await store.close()
        print(json.dumps([result, error]), flush=True)


if __name__ == "__main__":
    asyncio.run(_run_commands())
