"""`ctx.subtask`: work inside a segment whose result is recorded before it is returned.

The context only checks and types it; a `SubtaskRunner` knows what is recorded, and writes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.subtasks import SubtaskProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

P = ParamSpec("P")
T = TypeVar("T")

_current: ContextVar[str | None] = ContextVar("meshpoint_subtask", default=None)


def current_subtask() -> str | None:
    """The subtask whose code asks; asyncio tasks that it starts are part of it."""
    return _current.get()


@contextmanager
def inside(subtask: str) -> Iterator[None]:
    """Whoever runs here runs in `subtask`."""
    token = _current.set(subtask)
    try:
        yield
    finally:
        _current.reset(token)


class SubtaskRunner(Protocol):
    """Runs the subtasks of one segment, or returns what is recorded of them."""

    @property
    def progress(self) -> SubtaskProgress: ...

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The deliverable of a subtask, recorded."""

    async def save_progress(self, subtask: str, state: object) -> None:
        """Keep the state of a subtask that runs."""

    def saved_progress(self, subtask: str) -> JsonValue:
        """The state that was kept of it; None: none."""


class Subtasking:
    """The part of a context that records work inside a segment."""

    _subtasks: SubtaskRunner | None

    def run_subtasks_with(self, runner: SubtaskRunner | None) -> None:
        """Record this context's subtasks with `runner`, or stop that. For the code that runs agents."""
        self._subtasks = runner

    @overload
    async def subtask(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def subtask(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def subtask(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What `function(*args, **kwargs)` returns, recorded in the database before it is returned.

            statements = await ctx.subtask("10k_parsing", parse, filing)

        A later run of the same task (after a crash, a pause, a failure, a cancellation) gets the recorded
        deliverable, and the code does not run again. What to know of it:

        - The deliverable must have a JSON form. It comes back as the type that `function` declares to return, and as
          plain JSON if it declares none: the first time as well, so that no run differs.
        - A name occurs once in a run. A subtask has none inside it, but may call peers (in a function agent) and so
          pause. Subtasks may run side by side, in `asyncio.gather` or in the tools of a framework.
        - What it sets on `ctx` is recorded too, and put back where it is not run again.
        - When a failed or cancelled operation is resumed, the first subtask whose function, or whose inputs, differ
          from what was recorded runs again, and so does everything after it. Inputs are the arguments, which must be
          data, and what the function finds by closure as far as it is data. A function is told from another by its
          source, or by `@subtask(version="2")`; what it calls is not looked at.
        - In a context that no replica made, as in a unit test of an agent, the function is just called.

        Raises:
            SubtaskRefused: the name is taken or not usable, an argument is not data, or the deliverable has no JSON
                form; nothing is marked as done. Or an argument differs from the one of an earlier run of this very
                attempt, which names what depends on time or chance.
        """
        if self._subtasks is not None:
            return await self._subtasks.run(name, function, args, kwargs)
        with inside(name):
            value = function(*args, **kwargs)
            return await value if isawaitable(value) else value

    @property
    def progress(self) -> SubtaskProgress:
        """How many of the task's subtasks are completed, which are, and which one runs."""
        return SubtaskProgress((), None, ()) if self._subtasks is None else self._subtasks.progress

    async def save_progress(self, state: object) -> None:
        """Keep an intermediate state of the subtask that runs: `saved_progress` gives it back if it runs again.

        `state` is JSON. It is forgotten when the subtask is completed, or runs again with another function or inputs.

        Raises:
            NotJson: `state` is not JSON; names the place.
            AgentMisbehaved: no subtask runs here.
        """
        subtask = current_subtask()
        if subtask is None:
            raise AgentMisbehaved("ctx.save_progress belongs inside the function of a ctx.subtask")
        if self._subtasks is not None:
            await self._subtasks.save_progress(subtask, state)

    @property
    def saved_progress(self) -> Any:
        """What the subtask that runs here saved in an earlier run of it; None: nothing."""
        subtask = current_subtask()
        return None if subtask is None or self._subtasks is None else self._subtasks.saved_progress(subtask)
