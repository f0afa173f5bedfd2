"""Spans for segments, messages and subtasks, made of the events of a replica.

A task's `trace_context` carries its trace through pauses: it is stored with the task, and each
segment puts its own span into it. Messages carry that span as W3C's `traceparent`.

Whether a trace is sampled is decided once, by its first segment. The rest of an unsampled trace
has no spans, and costs a look at its `traceparent`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from meshpoint._version import __version__
from meshpoint.model.events import Event, Phase, Step
from meshpoint.ports.observer import SelectiveObserver

PARENT = "meshpoint.parent"
"""In a task's trace context: the `traceparent` of the span that is the parent of its segments."""
_TRACEPARENT = "traceparent"
_TRACEPARENT_PATTERN = re.compile(
    "(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    "-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_KNOWN_PARENTS = 4096
_SUCCESSES = frozenset({"completed", "draining"})


@dataclass(slots=True)
class _OpenSegment:
    """The span of a segment, until its result is committed.

    It is the current span of the agent's code while `token` is set. A span that records nothing
    counts as ended.
    """

    span: Span
    token: Token[Context] | None
    is_ended: bool = False


@dataclass(slots=True)
class _OpenSpan:
    """The spans between a step's events, and the spans of the step around it."""

    step: Step
    spans: Sequence[Span]
    token: Token[Context] | None
    outer: _OpenSpan | None


# The events at both ends of a step come from one asyncio task.
_segment: ContextVar[_OpenSegment | None] = ContextVar("meshpoint.segment_span", default=None)
_innermost: ContextVar[_OpenSpan | None] = ContextVar("meshpoint.open_span", default=None)


class TracingObserver(SelectiveObserver):
    """Starts and ends the spans of one process, for all its agents.

    `messaging_system` names the broker in the attributes of messages.
    """

    def __init__(self, messaging_system: str) -> None:
        self._system = messaging_system
        self._tracer = trace.get_tracer("meshpoint", __version__)
        ends = (Phase.AFTER, Phase.FAILED)
        self.handlers = {
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

    def _begin_segment(self, event: Event) -> None:
        detail: Mapping[str, Any] = event.all_details()
        carrier = detail.get("trace")
        if carrier is None:  # the event of another process was too long to be reported in full
            carrier = {}
        previous = _find_origin(carrier.get(_TRACEPARENT))
        parent, linked = _NO_ORIGIN, [previous]
        if PARENT in carrier:  # an earlier segment has begun the trace, or joined it
            parent = _find_origin(carrier[PARENT])
        elif detail.get("call_depth"):  # a task of a task belongs to the same trace
            parent, linked = previous, []
        if parent.is_unsampled:  # `carrier` names it already
            token = otel_context.attach(parent.context)
            _segment.set(_OpenSegment(trace.INVALID_SPAN, token, is_ended=True))
            return
        linked += [_find_origin(answer["trace"]) for answer in detail.get("answers") or ()]
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
            parent.context,
            SpanKind.INTERNAL,
            _without_none(attributes),
            _links(linked),
        )
        self._store(carrier, span.get_span_context(), previous.span)
        is_recording = span.is_recording()
        if is_recording and detail.get("generation"):
            span.add_event("gen_ai.agent.resumed", {"pause.id": _pause_id(event)})
        context = trace.set_span_in_context(span, parent.context)
        _segment.set(_OpenSegment(span, otel_context.attach(context), is_ended=not is_recording))

    def _store(
        self, carrier: dict[str, Any], span: SpanContext, previous: SpanContext | None
    ) -> None:
        """Put the span of a segment into its task's trace context."""
        if not span.is_valid:
            return
        before, carrier[_TRACEPARENT] = carrier.get(_TRACEPARENT), _traceparent(span)
        if PARENT not in carrier:
            is_child = previous is not None and previous.trace_id == span.trace_id
            carrier[PARENT] = before if is_child else carrier[_TRACEPARENT]

    def _leave_segment(self, event: Event) -> None:
        segment = _segment.get()
        if segment is None:
            return
        if segment.token is not None:
            otel_context.detach(segment.token)
            segment.token = None
        if segment.is_ended:
            return
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
        current = trace.get_current_span()
        if current.get_span_context().is_valid and not current.is_recording():
            self._push(event, [])
            return
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
        self._push(event, [span for span in spans if span is not None])

    def _begin_process(self, event: Event) -> None:
        messages = _messages(event)
        span = None
        if messages:
            queue = messages[0]["queue"]
            span = self._start_message_span("process", SpanKind.CONSUMER, queue, messages)
        self._push(event, [] if span is None else [span])

    def _start_message_span(
        self, operation: str, kind: SpanKind, queue: str, messages: Sequence[Mapping[str, Any]]
    ) -> Span | None:
        """Start the span of messages in one queue, unless all belong to unsampled traces.

        It belongs to the trace of the others if they share one parent. Otherwise it links to each
        of them.
        """
        named = map(_find_origin, {message["trace"]: None for message in messages})
        origins = [origin for origin in named if not origin.is_unsampled]
        if not origins:
            return None
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
        is_shared = len(origins) == 1
        return self._tracer.start_span(
            f"{operation} {destination}",
            origins[0].context if is_shared else _NO_ORIGIN.context,
            kind,
            attributes,
            [] if is_shared else _links(origins),
        )

    def _push(
        self, event: Event, spans: Sequence[Span], token: Token[Context] | None = None
    ) -> None:
        _innermost.set(_OpenSpan(event.step, spans, token, _innermost.get()))

    def _end_span(self, event: Event) -> None:
        opened = _innermost.get()
        if opened is None or opened.step is not event.step:
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
    return cast("Sequence[Mapping[str, Any]]", messages)


def _destination(queue: str) -> str:
    """The name of a queue without the id of a replica."""
    return queue[: queue.index(".private.")] + ".private" if ".private." in queue else queue


def _pause_id(event: Event) -> str:
    return f"{event.task_ids[0]}/{event.detail.get('generation')}"


class _Origin:
    """The span that a message or a task names."""

    def __init__(self, span: SpanContext | None) -> None:
        self.span = span
        self.is_unsampled = span is not None and not span.trace_flags.sampled

    @cached_property
    def context(self) -> Context:
        """The context in which it is the current span; empty without a span."""
        if self.span is None:
            return Context()
        return trace.set_span_in_context(NonRecordingSpan(self.span), Context())


_NO_ORIGIN = _Origin(None)


def _find_origin(traceparent: object) -> _Origin:
    return _parse(traceparent) if isinstance(traceparent, str) else _NO_ORIGIN


@lru_cache(_KNOWN_PARENTS)
def _parse(traceparent: str) -> _Origin:
    """Parse a `traceparent`. Several events name the same."""
    found = _TRACEPARENT_PATTERN.fullmatch(traceparent)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return _NO_ORIGIN
    trace_id, span_id, flags = (int(found[each], 16) for each in ("trace", "span", "flags"))
    span = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return _Origin(span) if span.is_valid else _NO_ORIGIN


def _traceparent(span: SpanContext) -> str:
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _links(origins: Iterable[_Origin]) -> list[Link]:
    return [Link(origin.span) for origin in origins if origin.span is not None]


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def current_traceparent() -> str | None:
    """The current span as W3C's `traceparent`; `None` without one."""
    span = trace.get_current_span().get_span_context()
    return _traceparent(span) if span.is_valid else None
