"""Make a paused task resumable by any replica, or keep it in memory if that fails."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from pydantic import JsonValue
from pydantic_core import to_json

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import AgentPaused, FinalCheckpoint, RequestedSegment, Segment
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.calls import Call
from meshpoint.model.context import TaskExecutionContext, traceparent_of
from meshpoint.model.envelopes import encode_request
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id, resumed_id
from meshpoint.model.json_values import json_digest
from meshpoint.model.messages import TRACEPARENT, Header, HeaderValue
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import QuestionCall
from meshpoint.model.signals import ReceiveCall
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import PlannedCall, logged_format, waits_format
from meshpoint.model.transitions import Pause, PauseCommitted, PauseResult
from meshpoint.model.waits import Sleep, display_name, is_wait, wait_kind
from meshpoint.subtasks.runner import Subtasks


def plan_pause(
    segment: Segment,
    returned: AgentPaused,
    state_format: str,
    options: Options,
    earlier_children: Sequence[Child] = (),
    final_checkpoint: FinalCheckpoint | None = None,
    *,
    now: datetime,
) -> Pause:
    """Build the checkpoint to write.

    Ids are generated once, here, so that a repeated write has the same ids.

    A call that an earlier attempt at an operation also made goes to the same task of the peer: see
    `_ChildPlanner`. `final_checkpoint` is the operation's own, stored while it waits. Sleeps
    with an end at or before `now` end at once.
    """
    paused, workspace, is_new = returned.paused, returned.workspace, segment.run.fence == 0
    operation, context = workspace.operation, workspace.context
    planner = None if operation is None else _ChildPlanner(operation, earlier_children)
    recorder = workspace.context_runtime.recorder
    if any(is_wait(call.peer) for call in paused.calls) or (recorder and recorder.has_waited):
        state_format = waits_format(state_format)
    log_change = segment.log.change(
        paused,
        None if final_checkpoint is None else final_checkpoint.notes,
        keeps_steps=recorder is not None,
    )
    is_logged = not segment.log.is_empty_after(log_change)
    calls = tuple(
        _plan_wait(call, now)
        if is_wait(call.peer)
        else _plan_call(call, context, options, planner)
        for call in paused.calls
    )
    return Pause(
        run=segment.run,
        context=context.to_checkpoint_dict(),
        state=paused.state,
        state_format=logged_format(state_format) if is_logged else state_format,
        calls=calls,
        join=paused.join,
        requester=segment.requester,
        request=encode_request(segment.message)
        if is_new and isinstance(segment, RequestedSegment)
        else None,
        app_version=options.app_version,
        children=tuple(planner.planned) if planner is not None else (),
        checkpoint=None if final_checkpoint is None else final_checkpoint.checkpoint,
        digest=segment.digest if is_new else None,
        log=log_change,
    )


def find_repeated_question(calls: Sequence[Call]) -> str | None:
    """The name of a question that is asked twice in one pause, or `None`."""
    questions = [call for call in calls if isinstance(call, QuestionCall)]
    ids = [call.sub_task_id for call in questions]
    for call in questions:
        if ids.count(call.sub_task_id) > 1:
            return display_name(call.peer)
    return None


class _ChildPlanner:
    """Maps the calls of an operation to tasks of its peers.

    In a resumed operation, a call with the same peer and input as in an earlier attempt reuses
    that attempt's task, so that the peer resumes from its own checkpoint, or just answers again.
    """

    def __init__(self, subtasks: Subtasks, earlier_children: Sequence[Child]) -> None:
        self._retry_count, self._paused_subtask = subtasks.retry_count, subtasks.paused_subtask
        self._reusable = subtasks.reusable_children(earlier_children)
        self.planned: list[Child] = []

    @property
    def order(self) -> str:
        """Text that sorts requests for the same task by age, the latest last."""
        return f"{self._retry_count:08d}"

    def assign_task(self, call: Call) -> tuple[TaskId, TaskId]:
        """Return the id of the peer's task and the id of the call.

        They differ if the call resumes an existing task of the peer.
        """
        digest = json_digest(call.input)
        existing = next(
            (
                child
                for child in self._reusable
                if (child.peer, child.digest) == (call.peer, digest)
            ),
            None,
        )
        if existing is not None:
            self._reusable.remove(existing)
        task_id = existing.id if existing is not None else TaskId(new_id())
        peer = AgentName(call.peer)
        self.planned.append(
            Child(
                id=task_id,
                peer=peer,
                digest=digest,
                subtask=self._paused_subtask,
                retry=self._retry_count,
            )
        )
        return task_id, task_id if existing is None else resumed_id(task_id, self._retry_count)


async def commit_pause(
    pause: Pause, backend: Backend | None, runtime: ReplicaRuntime
) -> tuple[Backend, PauseResult]:
    """Commit `pause`. Returns the backend it was written to and the result.

    A task with a row always stays in its backend, and its write is repeated until the database
    answers.
    """

    async def write(backend: Backend) -> PauseResult:
        return (await backend.store.pause([pause]))[0]

    run = pause.run
    with runtime.steps.step(
        Step.CHECKPOINT, [run.task_id], partial(_describe, pause), generation=run.generation + 1
    ) as detail:
        if backend is None:
            backend, result = await runtime.write_first(run.task_id, write)
        else:
            result = await runtime.retry.until_available(partial(write, backend))
        detail["committed"] = isinstance(result, PauseCommitted)
        return backend, result


def _describe(pause: Pause) -> dict[str, JsonValue]:
    """More details of the events of a pause: its size and what it waits for.

    `bytes` counts what the pause writes of the state and the log.
    """
    log, join = pause.log, pause.join
    size = 0 if log is not None and log.keeps_state else len(pause.state)
    return {
        "bytes": size + (0 if log is None else sum(map(len, log.entries))),
        "waits_for": list[JsonValue](sorted({wait_kind(call.peer) for call in pause.calls})),
        "join_seconds": None if join.deadline is None else join.deadline.total_seconds(),
    }


def _plan_call(
    call: Call, context: TaskExecutionContext, options: Options, planner: _ChildPlanner | None
) -> PlannedCall:
    if planner is not None:
        peer_task_id, sub_task_id = planner.assign_task(call)
    else:
        peer_task_id = sub_task_id = TaskId(new_id())
    depth = context.a2a_context.call_depth + 1
    body = _encode_request_body(peer_task_id, call, context)
    headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: depth}
    idle_timeout = call.idle_timeout
    if idle_timeout is None and call.timeout is None:
        idle_timeout = options.peer_timeout
    if idle_timeout is not None:
        headers[Header.IDLE_TIMEOUT.value] = idle_timeout.total_seconds()
    if planner is not None and sub_task_id != peer_task_id:
        headers[Header.RESUME.value] = planner.order
    if (traceparent := traceparent_of(context)) is not None:
        headers[TRACEPARENT] = traceparent
    return PlannedCall(
        sub_task_id=sub_task_id,
        call_id=call.id,
        peer=AgentName(call.peer),
        body=body,
        timeout=call.timeout,
        idle_timeout=idle_timeout,
        headers=headers,
        outcome=_refuse_invalid_call(depth, body, options),
        retry=call.retry,
    )


def _plan_wait(call: Call, now: datetime) -> PlannedCall:
    if isinstance(call, QuestionCall):
        return PlannedCall(
            sub_task_id=TaskId(call.sub_task_id),
            call_id=call.id,
            peer=AgentName(call.peer),
            body=to_json(call.details),
            timeout=call.timeout,
        )
    if isinstance(call, ReceiveCall):
        return PlannedCall(
            sub_task_id=TaskId(new_id()),
            call_id=call.id,
            peer=AgentName(call.peer),
            body=b"{}",
            timeout=call.timeout,
        )
    if not isinstance(call, Sleep):
        raise AgentMisbehaved(f"call {call.id!r}: {call.peer!r} is not the name of an agent")
    return _plan_sleep(call, now)


def _plan_sleep(sleep: Sleep, now: datetime) -> PlannedCall:
    return PlannedCall(
        sub_task_id=TaskId(new_id()),
        call_id=sleep.id,
        peer=AgentName(sleep.peer),
        body=b"{}",
        timeout=None,
        headers=sleep.to_headers(),
        outcome=Ok(None) if sleep.has_passed(now) else None,
    )


def _refuse_invalid_call(depth: int, body: bytes, options: Options) -> Failed | None:
    if depth > options.max_call_depth:
        return Failed(
            FailureKind.ERROR,
            f"call depth {depth} is beyond max_call_depth {options.max_call_depth}",
        )
    if len(body) > options.max_message_bytes:
        message = (
            f"the request has {len(body)} bytes; max_message_bytes is {options.max_message_bytes}"
        )
        return Failed(FailureKind.UNDELIVERABLE, message)
    return None


def _encode_request_body(sub_task_id: TaskId, call: Call, context: TaskExecutionContext) -> bytes:
    a2a = context.a2a_context
    metadata = {
        **a2a.metadata,
        "userId": a2a.user_id,
        "sessionId": a2a.session_id,
        "userConfig": a2a.user_config,
        "securityContext": context.security_context.to_plain(),
    }
    message = A2AMessage(
        message_id=sub_task_id,
        role="ROLE_AGENT",
        parts=[Part(data=call.input)],
        context_id=a2a.context_id,
        task_id=sub_task_id,
    )
    return RequestBody(
        message=message, metadata={k: v for k, v in metadata.items() if v}
    ).to_bytes()
