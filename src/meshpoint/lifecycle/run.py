"""Room 2: run agent code for one segment, and turn whatever it does into a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json, to_json

from meshpoint.errors import AgentFailed, IncompatibleState, InvalidInput, MemoryLost, MemoryUnavailable
from meshpoint.lifecycle.segment import Segment, Stop
from meshpoint.model.calls import Done, Paused
from meshpoint.model.checkpoint import Resumable
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.secrets import masked, traceback_of
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.observer import Steps

log = logging.getLogger("meshpoint.run")


@dataclass(frozen=True, slots=True)
class Stopped:
    """The code was stopped from outside before it came to an end."""

    why: Stop


@dataclass(frozen=True, slots=True)
class Unreadable:
    """This replica's agent cannot read the state, or, of an operation, its last checkpoint."""

    reason: str
    of_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The task's working memory cannot be had now. `lost`: it was there, and is not what it was."""

    reason: str
    lost: bool


SegmentResult: TypeAlias = Paused | Outcome | Stopped | Unreadable | Forgotten


async def first_segment(
    agent: DurableAgent[Any, Any], segment: Segment, input_: object, steps: Steps, secret_keys: Sequence[str] = ()
) -> SegmentResult:
    """Run `agent` on a new request."""
    assert segment.context is not None
    return await _run(agent.start(segment.context, input_), segment, steps, secret_keys)


async def next_segment(
    agent: DurableAgent[Any, Any],
    segment: Segment,
    task: Resumable,
    outcomes: Outcomes,
    steps: Steps,
    secret_keys: Sequence[str] = (),
) -> SegmentResult:
    """Run `agent` on from a checkpoint."""
    assert segment.context is not None
    return await _run(agent.resume(segment.context, task.state, outcomes), segment, steps, secret_keys)


async def _run(
    code: Coroutine[Any, Any, Paused | Done[Any]], segment: Segment, steps: Steps, secret_keys: Sequence[str]
) -> SegmentResult:
    """Run agent code in a task of its own, so that it can be stopped without stopping the room around it."""
    run = segment.run
    if segment.stopped is not None:
        code.close()
        return Stopped(segment.stopped)
    with steps.step(Step.SEGMENT, [run.task_id], generation=run.generation):
        guarded = _guarded(code, segment, secret_keys)
        running = segment.code = asyncio.create_task(guarded, name=f"segment {run.task_id}")
        running.add_done_callback(lambda _: code.close())  # stopped before its first step, nobody ever awaited it
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:  # the replica ends: what the code came to is nobody's result
            running.cancel()
            raise
        finally:
            segment.code = None
        if not running.cancelled():
            return running.result()
        if segment.stopped is not None:
            return Stopped(segment.stopped)
        return Failed(FailureKind.ERROR, "the agent's code cancelled itself")


async def _guarded(
    code: Coroutine[Any, Any, Paused | Done[Any]], segment: Segment, secret_keys: Sequence[str]
) -> SegmentResult:
    # The consumer edge: whatever agent code raises becomes an answer, SystemExit included, which would
    # otherwise end the replica and every task beside this one.
    try:
        return _result(await code, segment)
    except IncompatibleState as error:
        return Unreadable(str(error))
    except InvalidInput as error:
        return _failed(FailureKind.INVALID, str(error), segment)
    except AgentFailed as error:
        if (forgotten := _forgotten(error)) is not None:
            return forgotten
        _keep_details(error, segment, secret_keys)
        return _failed(FailureKind.ERROR, str(error), segment)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit) as error:
        _keep_details(error, segment, secret_keys)
        raise
    except BaseException as error:
        if (forgotten := _forgotten(error)) is not None:
            return forgotten
        log.warning("task %s: agent code raised", segment.run.task_id, exc_info=True)
        _keep_details(error, segment, secret_keys)
        return _failed(FailureKind.ERROR, f"{type(error).__name__}: {error}", segment)


def _forgotten(error: BaseException | None) -> Forgotten | None:
    """What became of the code if it ended for want of its memory, maybe in a TaskGroup or a framework's own error."""
    match error:
        case MemoryUnavailable():
            return Forgotten(str(error), isinstance(error, MemoryLost))
        case BaseExceptionGroup(exceptions=several):
            return next(filter(None, map(_forgotten, several)), None)
        case None:
            return None
        case _:
            return _forgotten(error.__cause__)


def _keep_details(error: BaseException, segment: Segment, secret_keys: Sequence[str]) -> None:
    """Note how an operation's code ended, for its last checkpoint. As text: a traceback holds on to all it ran in."""
    if segment.subtasks is not None and segment.subtasks.opened:
        segment.failure = {
            "type": type(error).__name__,
            "message": masked(str(error), secret_keys),
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
                return _failed(FailureKind.ERROR, f"the agent's output is not JSON: {error}", segment)
            try:
                more = tuple(dict(_json(artifact)) for artifact in artifacts)
            except (ValueError, TypeError) as error:
                return _failed(FailureKind.ERROR, f"the agent's artifacts are not JSON objects: {error}", segment)
            return Ok(value, _artifacts(segment, more), _usage(segment))
        case _:
            kind = type(returned).__name__
            return _failed(FailureKind.ERROR, f"the agent returned {kind}; it must return Paused or Done", segment)


def _json(value: object) -> Any:
    """`value` as it will arrive. Not-a-number and infinity, which a serializer would turn into null, are refused."""
    return from_json(to_json(value, inf_nan_mode="constants"), allow_inf_nan=False)


def _artifacts(segment: Segment, more: tuple[Any, ...]) -> tuple[Any, ...]:
    assert segment.context is not None
    return (*segment.context.produced_artifacts.to_plain(), *more)


def _usage(segment: Segment) -> Any:
    assert segment.context is not None
    return segment.context.token_usage.snapshot()


def _failed(kind: FailureKind, message: str, segment: Segment) -> Failed:
    return Failed(kind, message, _usage(segment))
