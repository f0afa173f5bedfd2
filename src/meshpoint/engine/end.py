"""End a task with its single outcome. The reply is committed, then published."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment, Segment
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.context import traceparent_of
from meshpoint.model.envelopes import encode_reply, fingerprint
from meshpoint.model.events import Step
from meshpoint.model.ids import split_resumed_id
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import Reply, Requester, TaskState
from meshpoint.model.transitions import End, EndCommitted, EndResult, Fenced


def build_refusal(
    segment: RequestedSegment,
    failure: Failed,
    *,
    id_in_use: bool = False,
    may_attach: bool = False,
) -> Reply:
    """Build the reply to a refused request.

    It names the request, so that it cannot end another call. `id_in_use`: a task with its id
    exists. `may_attach`: its sender may attach to that task.
    """
    run = segment.run
    body = encode_reply(
        run.task_id,
        None,
        failure,
        refused_fingerprint=fingerprint(segment.message),
        id_in_use=id_in_use,
        may_attach=may_attach,
    )
    return Reply(run.agent, run.task_id, _final_state_of(failure), body, segment.requester)


def build_reply(segment: Segment, outcome: Outcome, options: Options) -> tuple[Reply, Outcome]:
    """Build the reply with `outcome`, and return both.

    A result too large to send becomes a failure that says so.
    """
    workspace = segment.workspace
    retry = split_resumed_id(segment.requester.parent_task_id or "")[1]
    context_id = None if workspace is None else workspace.context.a2a_context.context_id
    encode = partial(
        encode_reply,
        segment.run.task_id,
        context_id,
        retry=retry,
        traceparent=None if workspace is None else traceparent_of(workspace.context),
    )
    body = encode(outcome=outcome)
    if len(body) > options.max_message_bytes:
        message = (
            f"the result has {len(body)} bytes; max_message_bytes is {options.max_message_bytes}"
        )
        outcome = Failed(FailureKind.ERROR, message, outcome.usage)
        body = encode(outcome=outcome)
    run = segment.run
    reply = Reply(run.agent, run.task_id, _final_state_of(outcome), body, segment.requester)
    return reply, outcome


def repeat_reply(stored: Reply, requester: Requester) -> Reply:
    """Address a stored reply to `requester`, which asks for the task again."""
    retry = split_resumed_id(requester.parent_task_id or "")[1]
    if retry is None:
        return replace(stored, requester=requester)
    body = parse_body(ResponseBody, stored.body).for_attempt(retry)
    return replace(stored, requester=requester, body=body.to_bytes())


def _final_state_of(outcome: Outcome) -> TaskState:
    """Return the final state of a task with `outcome`."""
    match outcome:
        case Ok():
            return TaskState.COMPLETED
        case Failed(kind=FailureKind.CANCELLED):
            return TaskState.CANCELLED
        case _:
            return TaskState.FAILED


async def commit_end(backend: Backend, command: End, runtime: ReplicaRuntime) -> EndResult:
    """Commit the outcome of a task with a row. Waits while the database is unavailable."""

    async def attempt() -> EndResult:
        return (await backend.store.end([command]))[0]

    run = command.run
    with runtime.steps.step(Step.END, [run.task_id], state=command.state.value):
        result = await runtime.retry.until_available(attempt)
    match result:
        case EndCommitted():
            if command.dead_reason:
                runtime.steps.emit(Step.DEAD_TASK, run.task_id, reason=command.dead_reason)
        case Fenced():
            runtime.steps.emit(Step.FENCED, run.task_id, what="end", fence=run.fence)
    return result
