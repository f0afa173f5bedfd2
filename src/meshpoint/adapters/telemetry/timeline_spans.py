"""A task's timeline as spans, after the fact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, format_trace_id

from meshpoint._version import __version__
from meshpoint.errors import ConfigurationError
from meshpoint.model.timeline import Change, TimelineEntry


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment, or the time between two segments, and the entries from its start to its end."""

    is_segment: bool
    entries: Sequence[TimelineEntry]


def export(entries: Sequence[TimelineEntry]) -> str:
    """Record the spans of a timeline in a new trace, and return its id.

    As in the traces of replicas, the first span is the parent of the others, and each links to the
    one before.

    Raises:
        ConfigurationError: The timeline has a single entry, which makes no span.
    """
    tracer = trace.get_tracer("meshpoint", __version__)
    parent, previous = Context(), list[Span]()
    for part in _parts(entries):
        first, last = part.entries[0], part.entries[-1]
        span = tracer.start_span(
            f"{'invoke_agent' if part.is_segment else 'wait'} {first.agent}",
            parent,
            SpanKind.INTERNAL,
            _attributes(part),
            [Link(each.get_span_context()) for each in previous],
            start_time=_nanoseconds(first),
        )
        for entry in part.entries[1:]:
            span.add_event(entry.change, _facts(entry), timestamp=_nanoseconds(entry))
        if last.change is Change.FAILED:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=max(_nanoseconds(first), _nanoseconds(last)))
        if not previous:
            parent = trace.set_span_in_context(span, parent)
        previous = [span]
    if not previous:
        problem = "its timeline has a single entry, and a span needs two"
        raise ConfigurationError(entries[0].task_id, problem, "export it later")
    root = trace.get_current_span(parent).get_span_context()
    provider = trace.get_tracer_provider()
    if (flush := getattr(provider, "force_flush", None)) is not None:
        flush()
    return format_trace_id(root.trace_id)


def _parts(entries: Sequence[TimelineEntry]) -> Iterator[_Part]:
    """Split a timeline where a segment begins or ends. The time after the end has no part."""
    start = 0
    for place, entry in enumerate(entries):
        if place == start:
            continue
        is_segment = entries[start].change.begins_segment
        is_boundary = entry.change.ends_segment if is_segment else entry.change.begins_segment
        if is_boundary or entry.change.is_final or place == len(entries) - 1:
            if not entries[start].change.is_final:
                yield _Part(is_segment, entries[start : place + 1])
            start = place


def _attributes(part: _Part) -> dict[str, str | int]:
    first = part.entries[0]
    attributes = {
        "gen_ai.operation.name": "invoke_agent" if part.is_segment else None,
        "gen_ai.agent.name": first.agent,
        "meshpoint.task.id": first.task_id,
        "meshpoint.generation": first.generation,
        "meshpoint.attempt": first.attempt if part.is_segment else None,
        "meshpoint.replica": first.replica if part.is_segment else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _facts(entry: TimelineEntry) -> dict[str, str | int]:
    facts = {
        "meshpoint.replica": entry.replica,
        "meshpoint.calls": entry.calls,
        "meshpoint.completed": entry.completed,
        "meshpoint.total": entry.total,
        "meshpoint.peer": entry.peer,
        "meshpoint.ref": entry.ref,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _nanoseconds(entry: TimelineEntry) -> int:
    return round(entry.at.timestamp() * 1_000_000) * 1000
