"""`ctx.subtask`: work inside a segment whose result is recorded before it is returned.

A `SubtaskRunner` reads and writes the records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from meshpoint.errors import AgentMisbehaved, SubtaskRefused
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.steps import nesting_problem
from meshpoint.model.subtasks import SubtaskProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")

_current_subtask: ContextVar[str | None] = ContextVar("meshpoint_subtask", default=None)


def current_subtask() -> str | None:
    """The subtask of the calling code and its asyncio tasks. `None` outside subtasks."""
    return _current_subtask.get()


@contextmanager
def subtask_scope(subtask: str) -> Iterator[None]:
    """Mark the code in the block as part of `subtask`."""
    token = _current_subtask.set(subtask)
    try:
        yield
    finally:
        _current_subtask.reset(token)


class SubtaskMixin:
    """The part of a context that records work inside a segment."""

    _runtime: ContextRuntime

    @overload
    async def subtask(
        self,
        name: str,
        function: Callable[_P, Awaitable[_T]],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T: ...
    @overload
    async def subtask(
        self, name: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T: ...
    async def subtask(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function(*args, **kwargs)`, record its result in the database, and return it.

            statements = await ctx.subtask("10k_parsing", parse, filing)

        A later run of the same task (after a crash, a pause, a failure or a cancellation) gets the
        recorded deliverable without running the code again. Within one attempt, this holds even if
        a deploy has changed the function or its inputs; changed inputs are logged as a warning.

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
          Functions are compared by source, including the helpers, classes and constants of their
          own module that they use, or by `@subtask(version="2")`.
        - In a context that was not created by a replica, as in a unit test of an agent, the
          function is simply called.

        Raises:
            SubtaskRefused: the name is taken or invalid, an argument is not data, or the
                deliverable has no JSON form; nothing is recorded as done.
            IncompatibleState: the recorded deliverable no longer fits the function's return type.
                Another version of the agent has to continue the task.
        """
        if (problem := nesting_problem(f"subtask {name!r}")) is not None:
            raise SubtaskRefused(problem)
        if (runner := self._runtime.subtasks) is not None:
            return await runner.run(name, function, args, kwargs)
        with subtask_scope(name):
            value = function(*args, **kwargs)
            return await value if isawaitable(value) else value

    @property
    def progress(self) -> SubtaskProgress:
        """Which of the task's subtasks are completed, and which one is running."""
        runner = self._runtime.subtasks
        return SubtaskProgress((), None, ()) if runner is None else runner.progress

    async def save_progress(self, state: object) -> None:
        """Store an intermediate state of the running subtask, for `saved_progress` in a later run.

        `state` must be JSON. It is deleted when the subtask completes or runs again with other
        inputs, or in a new attempt with another function.

        Raises:
            NotJson: `state` is not JSON; the message names the place.
            AgentMisbehaved: no subtask is running here.
        """
        subtask = current_subtask()
        if subtask is None:
            raise AgentMisbehaved(
                "ctx.save_progress works only inside the function of a ctx.subtask"
            )
        if (runner := self._runtime.subtasks) is not None:
            await runner.save_progress(subtask, state)

    @property
    def saved_progress(self) -> Any:
        """The state that an earlier run of the current subtask saved, or `None`."""
        subtask, runner = current_subtask(), self._runtime.subtasks
        return None if subtask is None or runner is None else runner.saved_progress(subtask)
