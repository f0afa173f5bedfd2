"""Room 3: make a paused task resumable by any replica, or keep it in memory when that cannot be."""

from __future__ import annotations

from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.lifecycle.patience import Patience
from meshpoint.lifecycle.segment import Segment
from meshpoint.lifecycle.site import Site
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.calls import Call, Paused
from meshpoint.model.checkpoint import Pause, PauseResult, PlannedCall
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.letters import pack
from meshpoint.model.messages import Header, HeaderValue
from meshpoint.model.options import OnCheckpointFailure, Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.home import Home


def plan(segment: Segment, paused: Paused, state_format: str, options: Options) -> Pause:
    """The checkpoint to write. Its ids are made here, once: a repeated write carries the same ones."""
    assert segment.context is not None
    return Pause(
        run=segment.run,
        context=segment.context.to_checkpoint_dict(),
        state=paused.state,
        state_format=state_format,
        calls=tuple(_planned(call, segment.context, options) for call in paused.calls),
        join=paused.join,
        requester=segment.requester,
        request=pack(segment.request) if segment.request and segment.run.fence == 0 else None,
        app_version=options.app_version,
    )


async def save(pause: Pause, home: Home | None, site: Site) -> tuple[Home, PauseResult]:
    """Commit `pause`; where it went, and what came of it.

    A task that has a row stays in its home for ever, and its write is repeated until the database answers.
    A first checkpoint goes to the database; when it certainly did not commit for
    `checkpoint_retry_time`, to memory. A write in doubt is repeated until the database
    tells.
    """
    with site.steps.step(Step.CHECKPOINT, [pause.run.task_id], generation=pause.run.generation + 1):
        if home is None and site.durable is not None:
            if site.options.on_checkpoint_failure is OnCheckpointFailure.KEEP_IN_MEMORY:
                return await _first(pause, site.durable, site)
            home = site.durable
        home = home or site.memory
        return home, await _write(pause, home, site.patience)


async def _first(pause: Pause, durable: Home, site: Site) -> tuple[Home, PauseResult]:
    try:
        return durable, await _write_unless_away(pause, durable, site)
    except StoreUnavailable as error:
        site.steps.note(Step.DEGRADED, pause.run.task_id, error=str(error))
        return site.memory, await _write(pause, site.memory, site.patience)


async def _write(pause: Pause, home: Home, patience: Patience) -> PauseResult:
    async def attempt() -> PauseResult:
        return (await home.store.pause([pause]))[0]

    return await patience.until_answered(attempt)


async def _write_unless_away(pause: Pause, home: Home, site: Site) -> PauseResult:
    in_doubt = False

    async def attempt() -> PauseResult:
        nonlocal in_doubt
        try:
            return (await home.store.pause([pause]))[0]
        except CommitInDoubt:
            in_doubt = True
            raise

    try:
        return await site.patience.for_a_while(attempt, site.options.checkpoint_retry_time)
    except StoreUnavailable:
        if not in_doubt:
            raise
        return await _write(pause, home, site.patience)


def _planned(call: Call, context: TaskExecutionContext, options: Options) -> PlannedCall:
    sub_task_id = TaskId(new_id())
    depth = context.a2a_context.call_depth + 1
    body = _request_body(sub_task_id, call, context)
    headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: depth}
    if call.idle_timeout is not None:
        headers[Header.IDLE_TIMEOUT.value] = call.idle_timeout.total_seconds()
    traceparent = context.trace_context.get(Header.TRACEPARENT.value)
    if isinstance(traceparent, str):
        headers[Header.TRACEPARENT.value] = traceparent
    return PlannedCall(
        sub_task_id=sub_task_id,
        call_id=call.id,
        peer=AgentName(call.peer),
        body=body,
        timeout=call.timeout or options.peer_timeout,
        idle_timeout=call.idle_timeout,
        headers=headers,
        outcome=_refusal(depth, body, options),
    )


def _refusal(depth: int, body: bytes, options: Options) -> Failed | None:
    if depth > options.max_call_depth:
        return Failed(FailureKind.ERROR, f"call depth {depth} is beyond max_call_depth {options.max_call_depth}")
    if len(body) > options.max_message_bytes:
        size = f"the request has {len(body)} bytes; max_message_bytes is {options.max_message_bytes}"
        return Failed(FailureKind.UNDELIVERABLE, size)
    return None


def _request_body(sub_task_id: TaskId, call: Call, context: TaskExecutionContext) -> bytes:
    a2a = context.a2a_context
    handed_on = {
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
    return RequestBody(message=message, metadata={k: v for k, v in handed_on.items() if v}).to_bytes()
