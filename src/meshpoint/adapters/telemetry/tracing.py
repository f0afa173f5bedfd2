"""Spans for segments, messages and subtasks, made of the events of a replica.

A task's `trace_context` carries its trace through pauses: it is stored with the task, and each
segment puts its own span into it. Messages carry that span as W3C's `traceparent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshpoint._version import __version__
from meshpoint.model.events import Event, Phase, Step

PARENT = "meshpoint.parent"
"""In a task's trace context: the `traceparent` of the span that is the parent of its segments."""
_TRACEPARENT = "traceparent"
_W3C = TraceContextTextMapPropagator()
_NO_CONTEXT = Context()
_KNOWN_PARENTS = 4096
_SUCCESSES = frozenset({"completed", "draining"})


@dataclass(slots=True)
class _OpenSegment:
    """The span of a segment, until its result is committed.

    It is the current span of the agent's code while `token` is set.
    """

    span: Span
    token: Token[Context] | None
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class _OpenSpan:
    """The spans between a step's events, and the spans of the step around it."""

    event: Event
    spans: Sequence[Span]
    token: Token[Context] | None
    outer: _OpenSpan | None


# The events at both ends of a step come from one asyncio task.
_segment: ContextVar[_OpenSegment | None] = ContextVar("meshpoint.segment_span", default=None)
_innermost: ContextVar[_OpenSpan | None] = ContextVar("meshpoint.open_span", default=None)


class TracingObserver:
    """Starts and ends the spans of one process, for all its agents.

    `messaging_system` names the broker in the attributes of messages.
    """

    def __init__(self, messaging_system: str) -> None:
        self._system = messaging_system
        self._tracer = trace.get_tracer("meshpoint", __version__)
        ends = (Phase.AFTER, Phase.FAILED)
        self._handlers: dict[tuple[Step, Phase], Callable[[Event], None]] = {
            (Step.SEGMENT, Phase.BEFORE): self._begin_segment,
            **{(Step.SEGMENT, phase): self._leave_segment for phase in ends},
            (Step.CHECKPOINT, Phase.BEFORE): self._note_pause,
            **{(Step.CHECKPOINT, phase): self._end_paused for phase in ends},
            **{
                (step, phase): self._end_unpaused
                for step in (Step.END, Step.RELEASE, Step.TASK_COMPLETED, Step.TASK_FAILED)
                for phase in (*ends, Phase.INFO)
            },
            (Step.SUBTASK, Phase.BEFORE): self._begin_subtask,
            (Step.DISPATCH, Phase.BEFORE): self._begin_send,
            (Step.RECEIVE, Phase.BEFORE): self._begin_process,
            (Step.CLAIM, Phase.BEFORE): self._begin_process,
            **{
                (step, phase): self._end_span
                for step in (Step.SUBTASK, Step.DISPATCH, Step.RECEIVE, Step.CLAIM)
                for phase in ends
            },
        }

    def emit(self, event: Event) -> None:
        """Start or end the spans of `event`."""
        if (handle := self._handlers.get((event.step, event.phase))) is not None:
            handle(event)

    def _begin_segment(self, event: Event) -> None:
        detail: Mapping[str, Any] = event.all_details()
        carrier = detail.get("trace")
        if carrier is None:  # the event of another process was too long to be reported in full
            carrier = {}
        previous = _span_context(carrier.get(_TRACEPARENT))
        parent, linked = Context(), [previous]
        if PARENT in carrier:  # an earlier segment has begun the trace, or joined it
            parent = _context_of(carrier[PARENT])
        elif detail.get("call_depth"):  # a task of a task belongs to the same trace
            parent, linked = _context_of(carrier.get(_TRACEPARENT)), []
        linked += [_span_context(answer["trace"]) for answer in detail.get("answers") or ()]
        (task_id,) = event.task_ids
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": event.agent,
            "gen_ai.agent.version": detail.get("version"),
            "gen_ai.conversation.id": detail.get("conversation"),
            "meshpoint.task.id": task_id,
            "meshpoint.generation": detail.get("generation"),
            "meshpoint.attempt": detail.get("attempt"),
        }
        span = self._tracer.start_span(
            f"invoke_agent {event.agent}",
            parent,
            SpanKind.INTERNAL,
            _without_none(attributes),
            _links(linked),
        )
        if detail.get("generation"):
            span.add_event("gen_ai.agent.resumed", {"pause.id": _pause_id(event)})
        context = trace.set_span_in_context(span, parent)
        self._store(carrier, context)
        _segment.set(_OpenSegment(span, otel_context.attach(context)))

    def _store(self, carrier: dict[str, Any], context: Context) -> None:
        """Put the span of `context` into a task's trace context."""
        before = carrier.get(_TRACEPARENT)
        _W3C.inject(carrier, context)
        if PARENT not in carrier:
            parent = trace.get_current_span(context).get_span_context()
            is_child = (known := _span_context(before)) is not None and (
                known.trace_id == parent.trace_id
            )
            carrier[PARENT] = before if is_child else carrier.get(_TRACEPARENT)

    def _leave_segment(self, event: Event) -> None:
        segment = _segment.get()
        if segment is None or segment.is_ended:
            return
        if segment.token is not None:
            otel_context.detach(segment.token)
            segment.token = None
        result = event.detail.get("result")
        if result != "paused":
            self._end_segment(segment, event, None if result in _SUCCESSES else str(result))

    def _note_pause(self, event: Event) -> None:
        if (segment := _open_segment()) is not None:
            detail = event.all_details()
            waits_for: Any = detail.get("waits_for") or ()
            attributes = {
                "pause.id": _pause_id(event),
                "pause.reason": ",".join(waits_for),
                "meshpoint.join_seconds": detail.get("join_seconds"),
            }
            segment.span.add_event("gen_ai.agent.paused", _without_none(attributes))

    def _end_paused(self, event: Event) -> None:
        if (segment := _open_segment()) is not None:
            if is_committed := event.detail.get("committed") is True:
                segment.span.add_event("gen_ai.agent.checkpointed", {"pause.id": _pause_id(event)})
            self._end_segment(segment, event, None if is_committed else "pause_refused")

    def _end_unpaused(self, event: Event) -> None:
        """End the span of a segment whose pause was not committed."""
        if (segment := _open_segment()) is not None:
            self._end_segment(segment, event, "pause_refused")

    def _end_segment(self, segment: _OpenSegment, event: Event, problem: str | None) -> None:
        segment.is_ended = True
        _end(segment.span, event, problem)

    def _begin_subtask(self, event: Event) -> None:
        name = str(event.detail.get("subtask"))
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
        span = self._tracer.start_span(f"execute_tool {name}", attributes=attributes)
        self._push(event, [span], otel_context.attach(trace.set_span_in_context(span)))

    def _begin_send(self, event: Event) -> None:
        by_queue: dict[str, list[Mapping[str, Any]]] = {}
        for message in _messages(event):
            by_queue.setdefault(message["queue"], []).append(message)
        spans = [
            self._start_message_span("send", SpanKind.PRODUCER, queue, messages)
            for queue, messages in by_queue.items()
        ]
        self._push(event, spans)

    def _begin_process(self, event: Event) -> None:
        messages = _messages(event)
        if messages:
            queue = messages[0]["queue"]
            span = self._start_message_span("process", SpanKind.CONSUMER, queue, messages)
            self._push(event, [span])
        else:
            self._push(event, [])

    def _start_message_span(
        self, operation: str, kind: SpanKind, queue: str, messages: Sequence[Mapping[str, Any]]
    ) -> Span:
        """Start the span of messages in one queue.

        It belongs to the trace of its messages if they share one parent. Otherwise it links to
        each of them.
        """
        destination = _destination(queue)
        attributes: dict[str, Any] = {
            "messaging.system": self._system,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": destination,
        }
        if len(messages) == 1:
            attributes["messaging.message.id"] = messages[0]["id"]
            attributes["messaging.message.conversation_id"] = messages[0]["correlation"]
        else:
            attributes["messaging.batch.message_count"] = len(messages)
        origins = {message["trace"] for message in messages}
        is_shared = len(origins) == 1
        return self._tracer.start_span(
            f"{operation} {destination}",
            _context_of(*origins) if is_shared else Context(),
            kind,
            attributes,
            [] if is_shared else _links(map(_span_context, sorted(origins - {None}))),
        )

    def _push(
        self, event: Event, spans: Sequence[Span], token: Token[Context] | None = None
    ) -> None:
        _innermost.set(_OpenSpan(event, spans, token, _innermost.get()))

    def _end_span(self, event: Event) -> None:
        opened = _innermost.get()
        if opened is None or opened.event.step is not event.step:
            return  # the observer was added between the two events
        _innermost.set(opened.outer)
        if opened.token is not None:
            otel_context.detach(opened.token)
        for span in opened.spans:
            _end(span, event, None)


def _open_segment() -> _OpenSegment | None:
    segment = _segment.get()
    return None if segment is None or segment.is_ended else segment


def _end(span: Span, event: Event, problem: str | None) -> None:
    if event.phase is Phase.FAILED:
        problem = str(event.detail.get("error_type"))
    if problem is not None:
        span.set_attribute("error.type", problem)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _messages(event: Event) -> Sequence[Mapping[str, Any]]:
    messages: Any = event.all_details().get("messages") or ()
    return list(messages)


def _destination(queue: str) -> str:
    """The name of a queue without the id of a replica."""
    return queue[: queue.index(".private.")] + ".private" if ".private." in queue else queue


def _pause_id(event: Event) -> str:
    return f"{event.task_ids[0]}/{event.detail.get('generation')}"


def _context_of(traceparent: object) -> Context:
    """The context whose span a message or a task names; empty if it names none."""
    return _parse(traceparent) if isinstance(traceparent, str) else _NO_CONTEXT


@lru_cache(_KNOWN_PARENTS)
def _parse(traceparent: str) -> Context:
    """The context of a `traceparent`. Contexts do not change, and several events name the same."""
    return _W3C.extract({_TRACEPARENT: traceparent}, Context())


def _span_context(traceparent: object) -> SpanContext | None:
    if not isinstance(traceparent, str):
        return None
    found = trace.get_current_span(_parse(traceparent)).get_span_context()
    return found if found.is_valid else None


def _links(contexts: Iterable[SpanContext | None]) -> list[Link]:
    return [Link(context) for context in contexts if context is not None]


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def current_traceparent() -> str | None:
    """The current span as W3C's `traceparent`; `None` without one."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get(_TRACEPARENT)
