"""Run agent code for one segment and turn the result into a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.engine.containment import Origin, from_outside
from meshpoint.engine.segment import Segment, Stop
from meshpoint.errors import AgentFailed, IncompatibleState, InvalidInput, MemoryLost, MemoryUnavailable
from meshpoint.model.calls import Done, Paused
from meshpoint.model.checkpoint import Resumable
from meshpoint.model.error_text import described, text_of
from meshpoint.model.events import Step
from meshpoint.model.json_values import copy_of, without_iterators
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.secrets import masked, traceback_of
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.observer import Steps

log = logging.getLogger("meshpoint.run")


@dataclass(frozen=True, slots=True)
class Stopped:
    """The code was stopped from outside before it finished."""

    why: Stop


@dataclass(frozen=True, slots=True)
class Unreadable:
    """This replica's agent cannot read the state, or the last checkpoint of an operation."""

    reason: str
    of_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The task's working memory is unavailable. `lost`: it existed, but its contents changed."""

    reason: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """The segment ran in its own process, which committed and sent the resulting messages."""


@dataclass(frozen=True, slots=True)
class Died:
    """The segment's own process died before settling. `counted` unless no agent code ran there."""

    reason: str
    counted: bool


SegmentResult: TypeAlias = Paused | Outcome | Stopped | Unreadable | Forgotten | Settled | Died


@dataclass(frozen=True, slots=True)
class Raised:
    """Agent code raised. `result` is its outcome, unless the code had been stopped."""

    result: SegmentResult


Begin: TypeAlias = Callable[[], Awaitable[Paused | Done[Any]]]
"""Calls agent code. Not a coroutine yet, since an exception in the call must fail the task too."""


async def first_segment(
    agent: DurableAgent[Any, Any], segment: Segment, input_: JsonValue, steps: Steps, secret_keys: Sequence[str] = ()
) -> SegmentResult:
    """Run `agent` on a copy of the input, because the row stores the original's digest."""
    assert segment.context is not None
    return await _run(partial(agent.start, segment.context, copy_of(input_)), segment, steps, secret_keys)


async def next_segment(
    agent: DurableAgent[Any, Any],
    segment: Segment,
    task: Resumable,
    outcomes: Outcomes,
    steps: Steps,
    secret_keys: Sequence[str] = (),
) -> SegmentResult:
    """Resume `agent` from a checkpoint."""
    assert segment.context is not None
    return await _run(partial(agent.resume, segment.context, task.state, outcomes), segment, steps, secret_keys)


async def _run(begin: Begin, segment: Segment, steps: Steps, secret_keys: Sequence[str]) -> SegmentResult:
    """Run agent code in its own asyncio task, so that it can be stopped without its caller."""
    run = segment.run
    if segment.stopped is not None:
        return Stopped(segment.stopped)
    with steps.step(Step.SEGMENT, [run.task_id], generation=run.generation):
        origin, exits = _origin(segment)
        guarded = _guarded(begin, segment, secret_keys)
        running = asyncio.create_task(guarded, name=f"segment {run.task_id}", context=origin.context())
        segment.code = running
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:  # the replica ends, so the result is discarded
            segment.cancel_code()
            raise
        finally:
            origin.close()
            if running.done():
                segment.code = None
        return _without_secrets(_result_of(running, exits, segment), secret_keys)


def _without_secrets(result: SegmentResult, secret_keys: Sequence[str]) -> SegmentResult:
    """Mask secrets in `result`, so requesters, logs and checkpoints see the same masked text."""
    if isinstance(result, Failed):
        return replace(result, message=masked(result.message, secret_keys))
    return result


def _origin(segment: Segment) -> tuple[Origin, list[str]]:
    """The origin of the running code, and its exits. A background task's exit stops the code."""
    exits: list[str] = []

    def on_exit(what: str) -> None:
        exits.append(what)
        segment.cancel_code()

    return Origin(on_exit), exits


def _result_of(
    running: asyncio.Task[SegmentResult | Raised], exits: Sequence[str], segment: Segment
) -> SegmentResult:
    ended = None if running.cancelled() else running.result()
    if ended is not None and not isinstance(ended, Raised) and not exits:
        return ended
    if segment.stopped is not None and (ended is None or isinstance(ended, Raised)):
        return Stopped(segment.stopped)  # a failed cleanup does not change the result
    if exits:
        return _failed(FailureKind.ERROR, exits[0], segment)
    if isinstance(ended, Raised):
        return ended.result
    return _failed(FailureKind.ERROR, "the agent's code cancelled itself", segment)


async def _guarded(begin: Begin, segment: Segment, secret_keys: Sequence[str]) -> SegmentResult | Raised:
    # The consumer edge: every exception in agent code becomes an answer, including SystemExit and
    # KeyboardInterrupt, which would otherwise end the replica and all its tasks.
    try:
        return _result(await begin(), segment)
    except asyncio.CancelledError as error:
        _keep_details(error, segment, secret_keys)
        raise
    except BaseException as error:
        if from_outside(error) or (isinstance(error, GeneratorExit) and not _runs(segment)):
            raise  # Ctrl-C, or the event loop was closed
        try:
            return Raised(_result_of_error(error, segment, secret_keys))
        except Exception as second:  # for example, circular causes
            log.warning("task %s: its error cannot be described: %s", segment.run.task_id, described(second))
            return Raised(_failed(FailureKind.ERROR, described(error), segment))


def _runs(segment: Segment) -> bool:
    try:
        return asyncio.current_task() is segment.code
    except RuntimeError:
        return False


def _result_of_error(error: BaseException, segment: Segment, secret_keys: Sequence[str]) -> SegmentResult:
    match error:
        case IncompatibleState():
            return Unreadable(text_of(error))
        case InvalidInput():
            return _failed(FailureKind.INVALID, text_of(error), segment)
    if (forgotten := _forgotten(error)) is not None:
        return forgotten
    _keep_details(error, segment, secret_keys)
    if isinstance(error, AgentFailed):
        return _failed(FailureKind.ERROR, text_of(error), segment)
    log.warning("task %s: agent code raised\n%s", segment.run.task_id, traceback_of(error, secret_keys))
    return _failed(FailureKind.ERROR, described(error), segment)


def _forgotten(error: BaseException | None) -> Forgotten | None:
    """The result if missing working memory ended the code, else `None`.

    Also searches exception groups and the causes of a framework's own error.
    """
    match error:
        case MemoryUnavailable():
            return Forgotten(text_of(error), isinstance(error, MemoryLost))
        case BaseExceptionGroup(exceptions=several):
            return next(filter(None, map(_forgotten, several)), None)
        case None:
            return None
        case _:
            return _forgotten(error.__cause__)


def _keep_details(error: BaseException, segment: Segment, secret_keys: Sequence[str]) -> None:
    """Record an operation's error for its last checkpoint.

    Stored as text, because a traceback keeps every frame and its variables alive.
    """
    if segment.subtasks is not None and segment.subtasks.is_operation:
        segment.failure = {
            "type": type(error).__name__,
            "message": masked(text_of(error), secret_keys),
            "traceback": traceback_of(error, secret_keys),
        }


def _result(returned: object, segment: Segment) -> SegmentResult:
    match returned:
        case Paused():
            return returned
        case Done(output=output, artifacts=artifacts):
            try:
                value = _json(output)
            except ValueError as error:
                return _failed(FailureKind.ERROR, f"the agent's output is not JSON: {text_of(error)}", segment)
            try:
                all_artifacts = (*_artifacts_of_context(segment), *_plain_artifacts(artifacts))
            except (ValueError, TypeError) as error:
                what = f"the agent's artifacts are not JSON objects: {text_of(error)}"
                return _failed(FailureKind.ERROR, what, segment)
            return Ok(value, all_artifacts, _usage(segment))
        case _:
            kind = type(returned).__name__
            return _failed(FailureKind.ERROR, f"the agent returned {kind}; it must return Paused or Done", segment)


def _json(value: object) -> Any:
    """`value` after a JSON round trip. Refuses NaN and infinity, which would turn into null."""
    return from_json(to_json(without_iterators(value), inf_nan_mode="constants"), allow_inf_nan=False)


def _plain_artifacts(artifacts: object) -> tuple[Any, ...]:
    if not isinstance(artifacts, (list, tuple)):  # an iterator may be endless
        raise TypeError(f"they are a {type(artifacts).__name__}, not a list or a tuple")
    return tuple(dict(_json(artifact)) for artifact in artifacts)


def _artifacts_of_context(segment: Segment) -> list[Any]:
    assert segment.context is not None
    produced = segment.context.produced_artifacts.to_plain()
    for index, artifact in enumerate(produced):
        if not isinstance(artifact, dict):
            raise TypeError(f"ctx.produced_artifacts[{index}] is a {type(artifact).__name__}")
    return produced


def _usage(segment: Segment) -> Any:
    assert segment.context is not None
    return segment.context.token_usage.snapshot()


def _failed(kind: FailureKind, message: str, segment: Segment) -> Failed:
    return Failed(kind, message, _usage(segment))
