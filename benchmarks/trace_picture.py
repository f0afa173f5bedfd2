"""Draw the trace of a trip through three agents, with two pauses, a kill and a rescue.

    python -m benchmarks.trace_picture docs/images/trace.svg

Only the order of the spans is drawn, since in a test mesh time stands still while code runs. A
replica that is killed never exports the span of its segment, so it is drawn with a broken outline.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.telemetry.tracing import TracingObserver
from meshpoint.model.events import Event
from meshpoint.testing import TestMesh

_NAMES = ("travel", "flights", "hotels")
_LEFT, _STEP, _WIDTH, _TOP, _ROW, _HEIGHT = 110, 118, 96, 60, 84, 34
_STYLE = """
    text { font: 14px -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; }
    text { fill: #1f2328; }
    .paper { fill: #ffffff; stroke: #d0d7de; }
    .name { font-weight: 600; }
    .soft { fill: #59636e; font-size: 12px; }
    .on { fill: #ffffff; font-weight: 600; font-size: 12px; text-anchor: middle; }
    .guide { stroke: #d0d7de; }
    .span { fill: #1a7f37; }
    .failed { fill: #cf222e; fill-opacity: 0.7; stroke: #cf222e; stroke-dasharray: 5 3; }
    .link { stroke: #0969da; stroke-width: 1.6; fill: none; }
    .link { stroke-dasharray: 4 3; marker-end: url(#head); }
    .child { stroke: #8c959f; stroke-width: 1.6; fill: none; }
    .head { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .paper { fill: #0d1117; stroke: #3d444d; }
      .soft { fill: #9198a1; } .on { fill: #0d1117; } .guide { stroke: #3d444d; }
      .span { fill: #3fb950; } .failed { fill: #f85149; }
      .link { stroke: #58a6ff; } .head { fill: #58a6ff; } .child { stroke: #656c76; }
    }
"""

_flights, _hotels = Peer("flights", str, str), Peer("hotels", str, str)


@agent("flights")
async def flights(ctx: TaskExecutionContext, city: str) -> str:
    return f"a flight to {city}"


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, city: str) -> str:
    return f"a hotel in {city}"


def _book(parts: list[str]) -> str:
    return " and ".join(parts)


@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> str:
    flight = await _flights(city)
    hotel = await _hotels(city)
    return await ctx.step("book", _book, [flight, hotel])


class _TracedMesh(TestMesh):
    """Shows its events to a tracer before they can kill a replica."""

    def __init__(self, *agents: Any) -> None:
        super().__init__(*agents)
        self._tracer = TracingObserver("memory")

    def _handle_event(self, replica: Any, event: Event) -> None:
        self._tracer.emit(event)
        super()._handle_event(replica, event)


class _Segments(SpanProcessor):
    """Collects the spans of segments at their start. The span of a killed segment never ends."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if span.name.startswith("invoke_agent"):
            self.spans.append(span)


async def record_trip() -> list[ReadableSpan]:
    """The spans of the segments, in the order of their start."""
    segments, provider = _Segments(), TracerProvider()
    provider.add_span_processor(segments)
    trace.set_tracer_provider(provider)
    async with _TracedMesh(travel, flights, hotels) as mesh:
        mesh.crash(before="step")
        await mesh.call(travel, "Rome")
    return segments.spans


def draw(spans: Sequence[ReadableSpan]) -> str:
    """The spans as bars from left to right, with their parents and links."""
    places = {_id(span): place for place, span in enumerate(spans)}
    width, height = _LEFT + _STEP * len(spans) + 10, _TOP + _ROW * len(_NAMES) + 20
    names = "\n".join(
        f'  <path class="guide" d="M{_LEFT - 10} {_y(name)}H{width - 20}"/>\n'
        f'  <text class="name" x="20" y="{_y(name) + 5}">{name}</text>'
        for name in _NAMES
    )
    lines = "\n".join(_draw_lines(span, spans, places) for span in spans)
    bars = "\n".join(_draw_bar(span, place) for place, span in enumerate(spans))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
  aria-labelledby="title desc">
  <title id="title">One trace through three agents, two pauses, a kill and a rescue</title>
  <desc id="desc">Each bar is the span of one segment, in the order of their start. Grey lines lead
    from a parent to its child, dashed arrows from a span to those that it links to. All have one
    trace id.</desc>
  <style>{_STYLE}  </style>
  <defs>
    <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
      markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>
  </defs>
  <rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>
  <text class="soft" x="20" y="28">grey: parent and child · dashed: links ·
    one trace for all</text>
{names}
{lines}
{bars}
</svg>
"""


def _draw_bar(span: ReadableSpan, place: int) -> str:
    failed = span.end_time is None
    x, y = _LEFT + _STEP * place, _y(_lane(span)) - _HEIGHT // 2
    events = " ".join(event.name.removeprefix("gen_ai.agent.") for event in span.events)
    label = "killed" if failed else ("resumed" if "resumed" in events else "started")
    end = "paused" if "paused" in events else ("" if failed else "done")
    note = f'<text class="soft" x="{x}" y="{y + _HEIGHT + 14}">{escape(end)}</text>' if end else ""
    return (
        f'  <rect class="{"failed" if failed else "span"}" x="{x}" y="{y}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="4"/>'
        f'<text class="on" x="{x + _WIDTH // 2}" y="{y + 22}">{label}</text>{note}'
    )


def _draw_lines(span: ReadableSpan, spans: Sequence[ReadableSpan], places: dict[int, int]) -> str:
    drawn: list[str] = []
    place = places[_id(span)]
    if span.parent is not None and span.parent.span_id in places:
        parent = places[span.parent.span_id]
        if _lane(spans[parent]) != _lane(span):
            x = _LEFT + _STEP * parent + _WIDTH - 8
            drawn.append(
                f'  <path class="child" d="M{x} {_y(_lane(spans[parent]))}V{_y(_lane(span))}'
                f'H{_LEFT + _STEP * place}"/>'
            )
    for link in span.links:
        if link.context.span_id in places:
            drawn.append(_draw_link(place, span, places[link.context.span_id], spans))
    return "\n".join(drawn)


def _draw_link(place: int, span: ReadableSpan, target: int, spans: Sequence[ReadableSpan]) -> str:
    start_x, start_y = _LEFT + _STEP * place + 12, _y(_lane(span))
    end_x, end_y = _LEFT + _STEP * target + _WIDTH - 12, _y(_lane(spans[target]))
    if start_y == end_y:
        top = start_y - _HEIGHT // 2
        lift = 14 + 6 * (place - target)
        return (
            f'  <path class="link" d="M{start_x} {top}Q{(start_x + end_x) // 2} {top - lift} '
            f'{end_x} {top}"/>'
        )
    bottom = start_y + _HEIGHT // 2
    return f'  <path class="link" d="M{start_x} {bottom}L{end_x} {end_y - _HEIGHT // 2}"/>'


def _y(name: str) -> int:
    return _TOP + _ROW // 2 + _ROW * _NAMES.index(name)


def _lane(span: ReadableSpan) -> str:
    return span.name.removeprefix("invoke_agent ")


def _id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def main() -> None:
    """Write the picture to the file that is named."""
    Path(sys.argv[1]).write_text(draw(asyncio.run(record_trip())), encoding="utf-8")


if __name__ == "__main__":
    main()
