"""An event loop whose order and time are derived from a seed.

Assumptions about the order of callbacks:

- In reality each simulated process has its own loop, so callbacks of different processes may
  interleave in any way, and a process may lag. A callback's process is a context variable, which
  asyncio passes on.
- asyncio runs the callbacks of one loop in the order in which they were scheduled; a loop that is
  not `unruly` does the same. An unruly loop permutes them within one turn: asyncio never does
  this, but programs should not depend on it, since any await may take one more turn.
- Callbacks never overlap: there are no threads.

While callbacks are ready, time advances by a tiny step per turn; otherwise it jumps to the next
timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Coroutine
from itertools import count
from random import Random
from typing import Any

WORLD = "world"
"""The process of servers, the network and the plan, which belong to no replica."""
_PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process", default=WORLD)
_TURN_SECONDS = 0.00001  # seconds
_LAG_PROBABILITY = 0.15
_MAX_TURNS = 3_000_000


class Deadlock(Exception):
    """Nothing can happen any more."""


def process_context(process: str) -> contextvars.Context:
    """Context in which everything that starts belongs to `process`."""
    context = contextvars.copy_context()
    context.run(_PROCESS.set, process)
    return context


def current_process() -> str:
    """The process of the running callback."""
    return _PROCESS.get()


class _NumberedFuture(asyncio.Future[Any]):
    """A future whose hash does not depend on its address, so that sets have a stable order."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    """A task with the same property."""

    def __init__(
        self, coro: Coroutine[Any, Any, Any], loop: SimulatedLoop, **options: Any
    ) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _NothingToSelect:
    def select(self, timeout: float | None) -> list[Any]:
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """A loop without files and without a wall clock."""

    def __init__(self, rng: Random, *, shuffles: bool = False) -> None:
        self.numbers = count()
        super().__init__()
        self._rng, self._shuffles = rng, shuffles
        self._now, self._turn_count = 0.0, 0
        self._selector = _NothingToSelect()
        self._stopped: set[str] = set()
        self._held_back: deque[Any] = deque()
        self._lagging: deque[Any] = deque()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        """A numbered future."""
        return _NumberedFuture(self)

    def freeze(self, process: str) -> None:
        """Run nothing of `process` until `thaw`: SIGSTOP, or, without a thaw, SIGKILL."""
        self._stopped.add(process)

    def thaw(self, process: str) -> None:
        """Let the process continue; its overdue timers fire at once."""
        self._stopped.discard(process)

    def is_frozen(self, process: str) -> bool:
        """Whether `process` is frozen."""
        return process in self._stopped

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return _NumberedTask(coro, self, **options)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        self._turn_count += 1
        if self._turn_count > _MAX_TURNS:
            raise Deadlock(f"{_MAX_TURNS} turns without an end")
        self._pass_time()
        self._schedule_turn()
        super()._run_once()  # type: ignore[misc]  # not in its stubs

    def _pass_time(self) -> None:
        self._now += _TURN_SECONDS
        thawed = any(_process_of(handle) not in self._stopped for handle in self._held_back)
        if not (self._ready or self._lagging or thawed or self._stopping):
            while self._scheduled and self._scheduled[0]._cancelled:
                self._next_timer()
            if not self._scheduled:
                raise Deadlock("nothing is scheduled")
            self._now = max(self._now, self._scheduled[0]._when)
        while self._scheduled and self._scheduled[0]._when <= self._now:
            handle = self._next_timer()
            if not handle._cancelled:
                self._ready.append(handle)

    def _next_timer(self) -> Any:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False
        self._timer_cancelled_count -= handle._cancelled
        return handle

    def _schedule_turn(self) -> None:
        """Fill `_ready` with the callbacks of this turn, in the order in which they run."""
        queues: dict[str, deque[Any]] = {}
        for handle in [*self._held_back, *self._lagging, *self._ready]:
            queues.setdefault(_process_of(handle), deque()).append(handle)
        self._held_back.clear()
        self._lagging.clear()
        self._ready.clear()
        turns: list[str] = []
        for process, queue in queues.items():
            if process in self._stopped:
                self._held_back.extend(queue)
            elif len(queues) > 1 and self._rng.random() < _LAG_PROBABILITY:
                self._lagging.extend(queue)
            else:
                if self._shuffles:
                    self._rng.shuffle(queue)
                turns += [process] * len(queue)
        self._rng.shuffle(turns)
        self._ready.extend(queues[process].popleft() for process in turns)

    # For type checking: attributes that BaseEventLoop does not declare.
    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _stopping: bool


def _process_of(handle: Any) -> str:
    process: str = handle._context.get(_PROCESS, WORLD)
    return process
