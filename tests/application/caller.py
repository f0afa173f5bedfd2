"""A caller of the application: reports an incident, follows it, decides, and reads the result."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from .update_order import UpdateOrder

_PAUSE = 0.2
"""Delay in seconds before a request to a killed service is repeated."""
_LEAVE_SHARE = 0.15
"""Share of the updates after which a reader closes its stream and opens another one."""
_POLL_INTERVAL = 1.0
_OPEN_STATES = ("queued", "running", "waiting", "ready", "unknown")
OBJECTIONS = ["objection: Why now?", "objection: Why only here?"]


@dataclass
class Record:
    """One incident, with everything that its caller saw."""

    number: int
    approve: bool
    channels: tuple[str, ...]
    sent_at: float = field(default_factory=time.time)
    results: list[str] = field(default_factory=list)  # one per read of the result
    problems: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)  # channels whose decision was accepted
    lines: list[tuple[float, str]] = field(default_factory=list)
    task_ids: set[str] = field(default_factory=set)
    updates: int = 0
    streams: int = 0
    is_done: bool = False

    def __post_init__(self) -> None:
        self.task_ids.add(self.task_id)

    @property
    def id(self) -> str:
        return str(self.number)

    @property
    def task_id(self) -> str:
        return f"incident-{self.id}"

    @property
    def incident(self) -> dict[str, str]:
        service = ("checkout", "search", "login")[self.number % 3]
        return {"id": self.id, "service": service, "summary": f"incident {self.number}"}

    def log(self, text: str) -> None:
        self.lines.append((time.time(), text))

    def add_problem(self, text: str) -> None:
        self.problems.append(text)
        self.log(f"PROBLEM: {text}")

    def add_result(self, source: str, result: object) -> None:
        """Record a result. All must be equal."""
        text = json.dumps(result, sort_keys=True)
        if not self.results:
            self._check_report(result)
        elif text != self.results[0]:
            self.add_problem(f"{source} differs: {text}, not {self.results[0]}")
        self.results.append(text)
        self.log(f"{source}: {text}")

    def _check_report(self, report: Any) -> None:
        if not isinstance(report, dict) or "timeline" not in report:
            self.add_problem(f"not a report: {report}")
            return
        service, by = self.incident["service"], report["decision"]["by"]
        expected = {
            "cause": f"{self.incident['summary']}: team-{service} deployed {service} an hour ago",
            "decision": {"approved": self.approve, "by": by},
            "follow_up": f"{service} is slow at the 99th percentile." if self.approve else None,
            "timeline": [
                "investigating",
                *OBJECTIONS,
                f"{'approved' if self.approve else 'refused'} by {by}",
                *(["rolled back", "followed up"] if self.approve else []),
            ],
        }
        if wrong := {name: report[name] for name in expected if report[name] != expected[name]}:
            self.add_problem(f"wrong: {wrong}")
        if by not in (self.accepted or self.channels):
            self.add_problem(f"{self.accepted} was accepted, but {by} decided")


class CommandLine:
    """`meshpoint tasks complete`, in at most two processes at a time."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._capacity = asyncio.Semaphore(2)

    async def complete(self, task_id: str, decision: str) -> tuple[bool, str]:
        """Answer the question. Returns whether the answer was accepted, and the output."""
        command = [sys.executable, "-m", "meshpoint.cli", "tasks", "complete"]
        async with self._capacity:
            process = await asyncio.create_subprocess_exec(
                *command,
                *(task_id, "approval", decision, "--config", str(self._config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
        return process.returncode == 0, output.decode().strip()


class Caller:
    """The caller of one incident. It survives every killed service."""

    def __init__(
        self,
        record: Record,
        services: list[str],
        client: httpx.AsyncClient,
        command_line: CommandLine,
        rng: random.Random,
        on_result: Callable[[], None],
    ) -> None:
        self._record, self._services, self._client = record, services, client
        self._command_line, self._rng, self._on_result = command_line, rng, on_result
        self._deciding: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Report, follow and decide; then read the result again from each service."""
        await self._start()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(group))
            for _ in range(2 if self._record.number % 2 else 1):
                group.create_task(self._follow(group))
        self._on_result()
        await self._attach_again()
        self._check_acceptance()
        self._record.is_done = True

    async def _start(self) -> None:
        await _repeat(lambda: self._try_start(self._pick_service()))

    async def _try_start(self, service: str) -> bool:
        response = await self._request("POST", f"{service}/incidents", self._record.incident)
        return response is not None and response.status_code == 202

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        """Poll for the result, alongside the stream: updates may be lost."""
        await _repeat(lambda: self._try_read(self._pick_service(), group), _POLL_INTERVAL)

    async def _try_read(self, service: str, group: asyncio.TaskGroup | None = None) -> bool:
        response = await self._request("GET", f"{service}/incidents/{self._record.id}")
        if response is None or response.status_code == 503:
            return False
        body = response.json()
        if body.get("state") in _OPEN_STATES:
            if group is not None and "approval" in body["waits_for"]:
                self._decide(group)
            return False
        self._record.add_result(f"GET of {service}", body.get("report") or body)
        return True

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Read the stream of updates to its end, over as many connections as it takes.

        Some connections end because their service is killed, others because the reader leaves.
        """
        last, order = None, UpdateOrder()
        while True:
            order.begin_stream()
            self._record.streams += 1
            try:
                async for event in self._stream(self._pick_service(), last, order):
                    last = event["id"]
                    if event["kind"] == "ended":
                        return
                    if event["kind"] == "question":
                        self._decide(group)
                    if self._rng.random() < _LEAVE_SHARE:
                        break
            except httpx.HTTPError as error:
                self._record.log(f"stream lost: {error!r}")
                await asyncio.sleep(_PAUSE)

    async def _stream(
        self, service: str, last: str | None, order: UpdateOrder
    ) -> AsyncIterator[dict[str, Any]]:
        url = f"{service}/incidents/{self._record.id}/updates"
        headers = {} if last is None else {"Last-Event-ID": last}
        self._record.log(f"stream from {service} after {last}")
        async with self._client.stream("GET", url, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    event = json.loads(line.removeprefix("data:"))
                    if not isinstance(event, dict):
                        self._record.add_problem(f"lost: {event}")
                        event = {"id": "end", "kind": "ended", "outcome": {"message": event}}
                    self._record_event(service, event, order)
                    yield event

    def _record_event(self, service: str, event: dict[str, Any], order: UpdateOrder) -> None:
        if event["kind"] == "ended":
            outcome = event["outcome"]
            self._record.add_result(f"stream of {service}", outcome.get("value") or outcome)
            return
        self._record.updates += 1
        self._record.task_ids.add(event["task_id"])
        self._record.log(f"{event['kind']} {event['id']} reset={event['reset']}")
        if problem := order.find_problem(event):
            self._record.add_problem(f"backwards: {problem}")

    def _decide(self, group: asyncio.TaskGroup) -> None:
        """Decide by each channel. A decision that was not accepted is repeated."""
        for channel in self._record.channels:
            running = self._deciding.get(channel)
            if not self._record.accepted and (running is None or running.done()):
                decide = self._decide_by_http if channel == "http" else self._decide_by_command
                self._deciding[channel] = group.create_task(decide())

    async def _decide_by_http(self) -> None:
        decision = {"approved": self._record.approve, "by": "http"}
        while True:
            url = f"{self._pick_service()}/incidents/{self._record.id}/decision"
            response = await self._request("POST", url, decision)
            if response is not None and response.status_code in {204, 409}:
                break
            await asyncio.sleep(_PAUSE)
        self._record.log(f"decided by HTTP: {response.status_code} {response.text}")
        if response.status_code == 204:
            self._record.accepted.append("http")

    async def _decide_by_command(self) -> None:
        decision = json.dumps({"approved": self._record.approve, "by": "cli"})
        accepted, output = await self._command_line.complete(self._record.task_id, decision)
        self._record.log(f"decided by command: {output}")
        if accepted:
            self._record.accepted.append("cli")

    async def _attach_again(self) -> None:
        """Each service must have the same result, for a reader, a stream and a repeated POST."""
        for service in self._services:
            await _repeat(partial(self._try_start, service))
            await _repeat(partial(self._try_read, service))
            await _repeat(partial(self._try_stream, service))

    async def _try_stream(self, service: str) -> bool:
        """Read a new stream to its end, which must come once."""
        try:
            events = [event async for event in self._stream(service, None, UpdateOrder())]
        except httpx.HTTPError:
            return False
        ends = [event["kind"] for event in events].count("ended")
        if ends > 1:
            self._record.add_problem(f"a stream ended {ends} times")
        return ends > 0  # a service that drains closes its streams

    def _check_acceptance(self) -> None:
        if len(self._record.accepted) > 1:
            self._record.add_problem(f"two decisions were accepted: {self._record.accepted}")

    async def _request(self, method: str, url: str, body: object = None) -> httpx.Response | None:
        """Send a request. Returns `None` if the service was killed."""
        try:
            return await self._client.request(method, url, json=body)
        except httpx.HTTPError as error:
            self._record.log(f"{method} {url}: {error!r}")
            return None

    def _pick_service(self) -> str:
        return self._rng.choice(self._services)


async def _repeat(attempt: Callable[[], Awaitable[bool]], pause: float = _PAUSE) -> None:
    """Repeat `attempt` until it succeeds."""
    while not await attempt():  # noqa: ASYNC110 - other processes have no events to await
        await asyncio.sleep(pause)
