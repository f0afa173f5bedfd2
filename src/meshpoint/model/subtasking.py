"""`ctx.subtask`: work inside a segment whose result is recorded before it is returned.

The context checks arguments and converts types. A `SubtaskRunner` reads and writes the records.
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
    """The subtask of the calling code and its asyncio tasks. `None` outside subtasks."""
    return _current.get()


@contextmanager
def inside(subtask: str) -> Iterator[None]:
    """Mark the code in the block as part of `subtask`."""
    token = _current.set(subtask)
    try:
        yield
    finally:
        _current.reset(token)


class SubtaskRunner(Protocol):
    """Runs the subtasks of one segment, or returns their recorded deliverables."""

    @property
    def progress(self) -> SubtaskProgress: ...

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run and record a subtask, or return its recorded deliverable."""

    async def save_progress(self, subtask: str, state: object) -> None:
        """Store the intermediate state of a running subtask."""

    def saved_progress(self, subtask: str) -> JsonValue:
        """The stored intermediate state of a subtask, or `None`."""


class Subtasking:
    """The part of a context that records work inside a segment."""

    _subtasks: SubtaskRunner | None

    def run_subtasks_with(self, runner: SubtaskRunner | None) -> None:
        """Record this context's subtasks with `runner`, or not at all. For the agent runtime."""
        self._subtasks = runner

    @overload
    async def subtask(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def subtask(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def subtask(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)`, record its result in the database, and return it.

            statements = await ctx.subtask("10k_parsing", parse, filing)

        A later run of the same task (after a crash, a pause, a failure or a cancellation) gets the
        recorded deliverable without running the code again.

        - The deliverable must have a JSON form. It is returned as the function's declared return
          type, or as plain JSON without one. This also holds for the first run, so that all runs
          see the same value.
        - A name must be unique within a run. Subtasks cannot be nested, but a function agent's
          subtask may call peers and thus pause. Subtasks may run concurrently, in `asyncio.gather`
          or as a framework's tools.
        - Changes that it makes to `ctx` are recorded, and reapplied when it does not run again.
        - When a failed or cancelled operation is resumed, the first subtask whose function or
          inputs differ from its record runs again, and so do all after it. Inputs are the
          arguments, which must be data, and values captured by closure, as far as they are data.
          Functions are compared by source, or by `@subtask(version="2")`; the functions that they
          call are not compared.
        - In a context that was not created by a replica, as in a unit test of an agent, the
          function is simply called.

        Raises:
            SubtaskRefused: the name is taken or invalid, an argument is not data, or the
                deliverable has no JSON form; nothing is recorded as done. Also raised if an
                argument differs from an earlier run of the same attempt; the message names the
                argument, which depends on time or chance.
        """
        if self._subtasks is not None:
            return await self._subtasks.run(name, function, args, kwargs)
        with inside(name):
            value = function(*args, **kwargs)
            return await value if isawaitable(value) else value

    @property
    def progress(self) -> SubtaskProgress:
        """Which of the task's subtasks are completed, and which one is running."""
        return SubtaskProgress((), None, ()) if self._subtasks is None else self._subtasks.progress

    async def save_progress(self, state: object) -> None:
        """Store an intermediate state of the running subtask, for `saved_progress` in a later run.

        `state` must be JSON. It is deleted when the subtask completes, or runs again with another
        function or inputs.

        Raises:
            NotJson: `state` is not JSON; the message names the place.
            AgentMisbehaved: no subtask is running here.
        """
        subtask = current_subtask()
        if subtask is None:
            raise AgentMisbehaved("ctx.save_progress works only inside the function of a ctx.subtask")
        if self._subtasks is not None:
            await self._subtasks.save_progress(subtask, state)

    @property
    def saved_progress(self) -> Any:
        """The state that an earlier run of the current subtask saved, or `None`."""
        subtask = current_subtask()
        return None if subtask is None or self._subtasks is None else self._subtasks.saved_progress(subtask)
