"""Run the code of each segment twice, and compare what the two runs do."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_jsonable_python

from meshpoint.errors import MeshpointError
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.current_context import running_context
from meshpoint.model.error_text import describe_exception
from meshpoint.model.outcomes import Outcomes
from meshpoint.ports.agent import DurableAgent, ReadsLog
from meshpoint.testing.errors import ReplayDiffers
from meshpoint.testing.nondeterminism import find_nondeterminism
from meshpoint.testing.tape import Diverged, PlayingTools, RecordingTools, Tape

Result: TypeAlias = Paused | Done[Any]
_Run: TypeAlias = Callable[[TaskExecutionContext], Awaitable[Result]]
_Agent = TypeVar("_Agent", bound=DurableAgent[Any, Any])


def checked(agent: _Agent, report: Callable[[ReplayDiffers], None]) -> _Agent:
    """Return a copy of `agent` that runs each segment twice and reports the first difference.

    The second run gets the same answers, and the recorded results of the first run's steps and
    subtasks. Its own result is dropped. A segment that uses `ctx.memory` runs once.
    """
    original: Any = type(agent)

    class Checked(original):  # type: ignore[misc]  # its base is known only here
        async def start(self, ctx: TaskExecutionContext, request: Any) -> Result:
            start = super().start
            return await _run_twice(ctx, lambda ctx: start(ctx, copy.deepcopy(request)), report)

        async def resume(
            self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
        ) -> Result:
            resume = super().resume
            return await _run_twice(ctx, lambda ctx: resume(ctx, state, outcomes), report)

    class CheckedWithLog(Checked):
        async def resume_with_log(
            self,
            ctx: TaskExecutionContext,
            state: bytes,
            log: Sequence[bytes],
            outcomes: Outcomes,
        ) -> Result:
            resume = super().resume_with_log
            return await _run_twice(ctx, lambda ctx: resume(ctx, state, log, outcomes), report)

    clone: Any = copy.copy(agent)
    clone.__class__ = CheckedWithLog if isinstance(agent, ReadsLog) else Checked
    return clone  # type: ignore[no-any-return]  # of a subclass of the agent's class


async def _run_twice(
    ctx: TaskExecutionContext, run: _Run, report: Callable[[ReplayDiffers], None]
) -> Result:
    tools, before, tape = ctx._runtime.tools, ctx.to_checkpoint_dict(), Tape()
    if tools is None or isinstance(tools, RecordingTools):  # one method calls another
        return await run(ctx)
    ctx._runtime.tools = RecordingTools(tools, ctx, tape)
    first = await run(ctx)
    ctx._runtime.tools = tools
    if tape.is_complete:
        twin = TaskExecutionContext.from_checkpoint_dict(before)
        playing = twin._runtime.tools = PlayingTools(tools, twin, tape)
        recorder = ctx._runtime.recorder
        number = None if recorder is None else recorder.passed + 1
        with find_nondeterminism() as places:
            second = await _run_again(twin, run)
        difference = _compare(first, second, number) or _find_missing_step(tape, playing)
        if difference is not None:
            report(ReplayDiffers("; ".join((f"replay differs {difference}", *places))))
    return first


@dataclass
class _Raised:
    description: str


async def _run_again(ctx: TaskExecutionContext, run: _Run) -> Result | _Raised:
    token = running_context.set(ctx)
    try:
        return await run(ctx)
    except Diverged as error:
        return _Raised(f"at a step: {error}")
    except Exception as error:
        reason = getattr(error, "reason", None)  # of a `ReplayMismatch`
        return _Raised(f"at {reason}" if reason else f"by an exception: {_describe_error(error)}")
    finally:
        running_context.reset(token)


def _describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, MeshpointError) else describe_exception(error)


def _find_missing_step(tape: Tape, playing: PlayingTools) -> str | None:
    missing = [key for key in tape.steps if key not in playing.played]
    return f"at a step: {missing[0][2]!r} ran only in the first run" if missing else None


def _compare(first: Result, second: Result | _Raised, number: int | None) -> str | None:
    """Describe how the second result differs; `None` if it does not."""
    if isinstance(second, _Raised):
        return second.description
    where = "at the pause" if number is None else f"at call {number}"
    if isinstance(first, Paused) and isinstance(second, Paused):
        return _compare_pauses(first, second, where)
    if isinstance(first, Done) and isinstance(second, Done):
        one, other = to_jsonable_python(first.output), to_jsonable_python(second.output)
        path = find_difference(one, other, "")
        return None if path is None else f"in the result{f' ({path})' if path else ''}"
    return f"{where}: the first run {_describe(first)}, the second {_describe(second)}"


def _describe(result: Result) -> str:
    return _describe_calls(result.calls) if isinstance(result, Paused) else "ended"


def _describe_calls(calls: Sequence[Call]) -> str:
    return "called " + " and ".join(call.peer for call in calls)


def _compare_pauses(first: Paused, second: Paused, where: str) -> str | None:
    peers = [[call.peer for call in paused.calls] for paused in (first, second)]
    if peers[0] != peers[1]:
        one, other = _describe_calls(first.calls), _describe_calls(second.calls)
        return f"{where}: the first run {one}, the second {other}"
    for call, again in zip(first.calls, second.calls, strict=True):
        if (path := find_difference(call.input, again.input, "input")) is not None:
            peer = f", {call.peer}" if len(first.calls) > 1 else ""
            return f"{where}{peer} ({path})"
        for each in fields(call):
            if each.name != "id" and getattr(call, each.name) != getattr(again, each.name, None):
                return f"{where} ({each.name})"
    if first.join != second.join:
        return f"{where} (join)"
    if (first.state, first.append) != (second.state, second.append):
        path = find_difference(_read(first.state), _read(second.state), "state") or "state"
        return f"{where} ({path})"
    return None


def _read(state: bytes) -> Any:
    try:
        return from_json(state)
    except (ValueError, ValidationError):
        return None


def find_difference(one: Any, other: Any, path: str) -> str | None:
    """The path of the first difference between two JSON values; `None` if they are equal."""
    match one, other:
        case dict(), dict():
            for key in sorted(one.keys() | other.keys()):
                inner = f"{path}.{key}".removeprefix(".")
                if key not in one or key not in other:
                    return inner
                if (found := find_difference(one[key], other[key], inner)) is not None:
                    return found
            return None
        case list(), list() if len(one) == len(other):
            for index, (each, again) in enumerate(zip(one, other, strict=True)):
                if (found := find_difference(each, again, f"{path}[{index}]")) is not None:
                    return found
            return None
    return None if one == other and type(one) is type(other) else path
