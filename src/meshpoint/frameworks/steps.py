"""Model requests and tools as steps of a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from hashlib import blake2b
from math import inf, nextafter
from time import time
from typing import Any

from pydantic import JsonValue

from meshpoint.errors import AgentFailed, MeshpointError, StepFailed
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.current_context import running_context
from meshpoint.model.error_text import describe_exception
from meshpoint.model.recorded_work import current_step

METADATA_KEY = "meshpoint"
"""Key in the metadata of a framework's tool or node. `False` runs it without recording it."""

_MAX_NAME_LENGTH = 120

_kept_errors: ContextVar[list[MeshpointError] | None] = ContextVar(
    "meshpoint_kept_errors", default=None
)


def recording_context() -> TaskExecutionContext | None:
    """The context of the running task, if the calling code can record a step there."""
    return running_context.get() if current_step() is None else None


class StepExited(MeshpointError):
    """A step has raised `GeneratorExit`. The task fails, and the model gets no error."""


class _ExitInStep(Exception):
    """What a step raises in place of `GeneratorExit`, so that it is recorded."""


async def record_step(
    ctx: TaskExecutionContext, name: str, function: Callable[[], Awaitable[JsonValue]]
) -> JsonValue:
    """Run `function` as a step, or return its recorded result.

    An error of Meshpoint is kept for `SwallowedErrors`.

    Raises:
        StepFailed: The function failed in this run or an earlier one.
        StepExited: The function has raised `GeneratorExit`.
        MeshpointError: The task cannot continue here.
    """
    try:
        result: JsonValue = await ctx.step(name, _without_exit(function))
        return result
    except StepFailed as error:  # a failure of the function, which a framework may handle
        if error.error_type != _ExitInStep.__name__:
            raise
        exited = StepExited(f"step {name!r} has raised {error.message}")
        _keep(exited)
        raise exited from error
    except AgentFailed:
        raise
    except MeshpointError as error:
        _keep(error)
        raise


def _without_exit(
    function: Callable[[], Awaitable[JsonValue]],
) -> Callable[[], Awaitable[JsonValue]]:
    """`function` without `GeneratorExit`, which some frameworks take for the end of a generator.

    asyncio and Meshpoint contain the other exceptions of this kind, `SystemExit` and
    `KeyboardInterrupt`.
    """

    async def run() -> JsonValue:
        try:
            return await function()
        except GeneratorExit as error:
            trace = error.__traceback__
            if trace is None or trace.tb_next is None:
                raise  # not from the function: this coroutine was closed
            raise _ExitInStep(describe_exception(error)) from error

    return run


def _keep(error: MeshpointError) -> None:
    kept = _kept_errors.get()
    if kept is not None:
        kept.append(error)


def step_name(*parts: str) -> str:
    """Build the name of a step from a kind, names and ids."""
    name = " ".join(parts)
    if name.isprintable() and len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{parts[0]} {digest}"


class StateChanges:
    """The changes that the tools of one segment make to states.

    Tools of one turn run in parallel, so their records may be repeated in another order than the
    tools have ended.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._latest: dict[tuple[int, str], float] = {}

    def add(self, state: object, names: Iterable[str]) -> float:
        """The time of a change to `names` in `state`, to be recorded with it."""
        self._last = max(time(), nextafter(self._last, inf))
        self._latest |= {(id(state), name): self._last for name in names}
        return self._last

    def repeat(self, state: object, names: Iterable[str], changed_at: float) -> set[str]:
        """The names in a recorded change that no later change has replaced."""
        self._last = max(self._last, changed_at)
        latest = {name for name in names if changed_at >= self._latest.get((id(state), name), 0)}
        self._latest |= {(id(state), name): changed_at for name in latest}
        return latest


class SwallowedErrors:
    """A block in which errors of steps settle the task, even if a framework swallows them.

    Some frameworks turn every exception of a tool into a message for the model.
    """

    def __enter__(self) -> SwallowedErrors:
        self._errors: list[MeshpointError] = []
        self._token = _kept_errors.set(self._errors)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: Any) -> None:
        _kept_errors.reset(self._token)
        if self._errors and (error is None or isinstance(error, Exception)):
            first = self._errors[0]
            if error is not first:
                raise first from error
