"""A timeline becomes the spans of one trace, with the times in the database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from meshpoint.adapters.telemetry import timeline_spans
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.timeline import Change, TimelineEntry

START = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def timeline(*changes: Change) -> list[TimelineEntry]:
    """One change per second, the segments by replica A."""
    return [
        TimelineEntry(
            id=number,
            task_id=TaskId("order-17"),
            agent=AgentName("travel"),
            at=START + timedelta(seconds=number),
            change=change,
            replica=ReplicaId("A"),
            generation=number,
            fence=1,
            attempt=1,
        )
        for number, change in enumerate(changes)
    ]


def seconds(span: ReadableSpan) -> tuple[int, int]:
    epoch = int(START.timestamp())
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // 10**9 - epoch, span.end_time // 10**9 - epoch


def test_segments_and_waits_are_spans_of_one_trace(exporter: InMemorySpanExporter) -> None:
    trace_id = timeline_spans.export(
        timeline(
            Change.BEGUN,
            Change.PAUSED,
            Change.ANSWERED,
            Change.ANSWERED,
            Change.ACQUIRED,
            Change.RESCUED,
            Change.COMPLETED,
        )
    )
    spans = exporter.get_finished_spans()
    assert [(span.name, *seconds(span)) for span in spans] == [
        ("invoke_agent travel", 0, 1),
        ("wait travel", 1, 4),
        ("invoke_agent travel", 4, 5),
        ("invoke_agent travel", 5, 6),
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    root, *others = spans
    assert root.parent is None
    assert [span.parent for span in others] == [root.context] * 3
    assert [[link.context for link in span.links] for span in spans] == [
        [],
        *[[span.context] for span in spans[:-1]],
    ]
    assert [event.name for event in spans[1].events] == ["answered", "answered", "acquired"]
    assert root.attributes is not None
    assert root.attributes["meshpoint.task.id"] == "order-17"
    assert root.attributes["meshpoint.replica"] == "A"


def test_a_new_attempt_continues_the_trace_of_a_failed_one(
    exporter: InMemorySpanExporter,
) -> None:
    timeline_spans.export(
        timeline(
            Change.BEGUN,
            Change.CANCEL_REQUESTED,
            Change.FAILED,
            Change.REVIVED,
            Change.ACQUIRED,
            Change.COMPLETED,
        )
    )
    first, second = exporter.get_finished_spans()
    assert (first.status.status_code, second.status.status_code) == (
        StatusCode.ERROR,
        StatusCode.UNSET,
    )
    assert (seconds(first), seconds(second)) == ((0, 2), (4, 5))


def test_the_first_segment_of_a_task_without_a_row_is_unknown(
    exporter: InMemorySpanExporter,
) -> None:
    timeline_spans.export(timeline(Change.PAUSED, Change.ANSWERED))
    (span,) = exporter.get_finished_spans()
    assert (span.name, *seconds(span)) == ("wait travel", 0, 1)


def test_a_single_entry_makes_no_span(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ConfigurationError, match="single entry"):
        timeline_spans.export(timeline(Change.PAUSED))


def test_a_clock_that_was_set_back_makes_no_negative_span(
    exporter: InMemorySpanExporter,
) -> None:
    first, second = timeline(Change.BEGUN, Change.PAUSED)
    timeline_spans.export([second, first])
    (span,) = exporter.get_finished_spans()
    assert seconds(span) == (1, 1)
