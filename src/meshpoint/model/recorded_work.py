"""`ctx.step` and `ctx.subtask`: work inside a segment, recorded before its result is returned.

A `StepRunner` and a `SubtaskRunner` read and write the records. This module runs the function of a
step, with the options that `@step` gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from meshpoint.errors import (
    AgentMisbehaved,
    ConfigurationError,
    MemoryFenced,
    MemoryUnavailable,
    StepFailed,
    SubtaskRefused,
)
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.error_text import exception_message, type_name
from meshpoint.model.outcomes import FailureKind
from meshpoint.model.retry_policy import Duration, RetryPolicy, duration_seconds
from meshpoint.model.subtasks import SubtaskProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS_ATTRIBUTE = "__meshpoint_step__"
_current_step: ContextVar[tuple[str, int] | None] = ContextVar("meshpoint_step", default=None)
_current_subtask: ContextVar[str | None] = ContextVar("meshpoint_subtask", default=None)


def current_step() -> str | None:
    """The step of the calling code and its asyncio tasks. `None` outside steps."""
    step = _current_step.get()
    return None if step is None else step[0]


@contextmanager
def step_scope(name: str, use: int = 0) -> Iterator[None]:
    """Mark the code in the block as part of step `name`, in its `use` of the name."""
    token = _current_step.set((name, use))
    try:
        yield
    finally:
        _current_step.reset(token)


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


def current_place() -> tuple[str | None, tuple[str, int] | None]:
    """The subtask of the calling code, and its step with the use of the name."""
    return _current_subtask.get(), _current_step.get()


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How to run the function of a step. `timeout` limits one attempt, in seconds."""

    retry: RetryPolicy | None = None
    timeout: float | None = None


_NO_OPTIONS = StepOptions()


def step(
    *, retry: RetryPolicy | None = None, timeout: Duration | None = None
) -> Callable[[_F], _F]:
    """Set how `ctx.step` runs a function.

        @step(retry=RetryPolicy(max_attempts=4), timeout=20)
        async def charge(order: Order) -> Receipt: ...

    Args:
        retry: When to call it again after a failure. The step ends with its last attempt; only
            that is recorded.
        timeout: Limit of one attempt, after which the function is cancelled. Only async functions
            can be cancelled.

    Raises:
        ConfigurationError: The timeout is not positive or the function is not async, or the
            callable takes no attributes (a builtin, a bound method).
    """
    try:
        seconds = None if timeout is None else duration_seconds(timeout, "timeout")
    except AgentMisbehaved as error:
        raise ConfigurationError("@step", str(error), "write timeout=20 for 20 seconds") from None
    if seconds == 0:
        raise ConfigurationError("@step", "timeout is 0", "leave it out for no limit")

    def decorate(function: _F) -> _F:
        if seconds is not None and not iscoroutinefunction(function):
            problem = f"timeout= cannot stop {function!r}, which is not async"
            raise ConfigurationError("@step", problem, "write async def, or leave timeout= out")
        try:
            setattr(function, _OPTIONS_ATTRIBUTE, StepOptions(retry, seconds))
        except AttributeError as error:
            problem = f"{function!r} cannot be given options"
            raise ConfigurationError("@step", problem, "apply @step(...) to a def") from error
        return function

    return decorate


async def run_step(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the function of step `name`, again as its options say.

    Raises:
        StepFailed: Its last attempt failed.
        MemoryUnavailable: It read the working memory, which is unavailable. The task is released.
    """
    options = getattr(function, _OPTIONS_ATTRIBUTE, _NO_OPTIONS)
    started, attempt = monotonic(), 1
    while True:
        try:
            return await _run_attempt(name, function, args, kwargs, options.timeout)
        except StepFailed as failure:
            attempt += 1
            if options.retry is None:
                raise
            wait = options.retry.wait_before(attempt, failure.kind, monotonic() - started)
            if wait is None:
                raise
        await asyncio.sleep(wait)


async def _run_attempt(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    timeout: float | None,
) -> Any:
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            value = function(*args, **kwargs)
            return await value if isawaitable(value) else value
    except (MemoryUnavailable, MemoryFenced):
        raise
    except Exception as error:
        if limit.expired() and isinstance(error, TimeoutError):
            problem = f"no result within {timeout:g} s"
            raise StepFailed(name, "TimeoutError", problem, FailureKind.TIMEOUT) from error
        message = exception_message(error)
        raise StepFailed(name, type_name(error), message, FailureKind.ERROR) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # This task was not cancelled: the function awaited something that was cancelled.
        problem = "it awaited something that was cancelled"
        raise StepFailed(name, "CancelledError", problem, FailureKind.ERROR) from error


def nesting_problem(inner: str) -> str | None:
    """Why recorded work called `inner` cannot begin in the calling code; `None` if it can."""
    outer = current_step()
    if outer is None:
        return None
    return (
        f"{inner} begins inside step {outer!r}: record only one of them, "
        "and call plain functions inside it"
    )


class RecordedWorkMixin:
    """The part of a context that records steps and subtasks."""

    _runtime: ContextRuntime

    @overload
    def step(
        self,
        name: str,
        fn: Callable[_P, Awaitable[_T]],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> Coroutine[Any, Any, _T]: ...
    @overload
    def step(
        self, name: str, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Coroutine[Any, Any, _T]: ...
    def step(
        self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Run `fn(*args, **kwargs)` once, record its result in the database, and return it.

            receipt = await ctx.step("charge", charge, order)

        A step survives a crash: once recorded, it never runs again in this attempt, and every
        later run gets the recorded result. Only a crash between the end of `fn` and the commit of
        its record runs it twice.

        - The result must have a JSON form. It is returned as the function's declared return type,
          or as plain JSON without one, in the first run as well.
        - A failure is recorded too, and raised as `StepFailed` in every run.
        - A step is found by its place: the number of pauses before it, the subtask around it, its
          name, and how often this place used the name. Two steps that are open at the same time
          need two names. Steps may run concurrently, in `asyncio.gather`.
        - A step makes no peer calls, begins no other step or subtask, and does not change
          `ctx.memory`. Await it before the next peer call.
        - Changes that it makes to `ctx` are recorded, and reapplied when it does not run again.
        - `@step(retry=, timeout=)` on the function sets retries and a time limit. A step that is
          cancelled in another way, as by `asyncio.wait_for`, is cancelled in every run.
        - Without a replica, as in a unit test of an agent, the function is called and nothing is
          recorded.

        Raises:
            StepFailed: `fn` failed, or its result has no JSON form or is too large.
            AgentMisbehaved: the name is invalid or in use, or the step begins inside another one.
            IncompatibleState: the recorded result no longer fits the function's return type, or a
                replay has reached a step that was not there before. The task is parked.
        """
        if (runner := self._runtime.steps) is not None:
            return runner.call(name, fn, args, kwargs)
        return _run_unrecorded(name, fn, args, kwargs)

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
            IncompatibleState: the recorded deliverable no longer fits the function's return type,
                or a replay has reached a subtask that was not there before. The task is parked.
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


async def _run_unrecorded(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if (problem := nesting_problem(f"step {name!r}")) is not None:
        raise AgentMisbehaved(problem)
    with step_scope(name):
        return await run_step(name, fn, args, kwargs)
