"""The work of every contender: a task that pauses for N peers, and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue

from benchmarks.random_text import make_conversation, make_text
from meshpoint.model.context import A2AContext, TaskExecutionContext
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import Address

AGENT, PEER = "travel", "flights"
NAMESPACE = "bench"
STATE_FORMAT, APP_VERSION = "travel/1", "7"
REPLY_TO, REQUESTER = "bench.desk.resp", "desk"
TIMEOUT, LEASE, DISPATCH_LEASE, TOMBSTONE_TTL = 600.0, 15.0, 5.0, 86400.0
"""In seconds."""

_STATES, _QUESTIONS = 16, 100
"""Different ones among the jobs of a round."""


@dataclass(frozen=True, slots=True)
class JobCall:
    """One peer call, and the claim id for its answer."""

    sub_task_id: str
    call_id: str
    body: bytes
    claim_id: str


@dataclass(frozen=True, slots=True)
class Job:
    """One task from pause to end."""

    task_id: str
    run_id: str
    parent_task_id: str
    context: dict[str, JsonValue]
    state: bytes
    request: bytes
    calls: tuple[JobCall, ...]
    answer: dict[str, JsonValue]
    reply: bytes


def jobs(fan_out: int, count: int, *, seed: int = 0) -> list[Job]:
    """Create `count` tasks with `fan_out` calls each. Only `seed` determines their contents."""
    random = Random(seed)
    states = [
        json.dumps({"history": make_conversation(random)}).encode()
        for _ in range(min(count, _STATES))
    ]
    questions = [make_text(random, 12) for _ in range(_QUESTIONS)]
    return [
        _job(random, fan_out, states[index % len(states)], questions) for index in range(count)
    ]


def _job(random: Random, fan_out: int, state: bytes, questions: Sequence[str]) -> Job:
    task_id = new_id()
    return Job(
        task_id=task_id,
        run_id=new_id(),
        parent_task_id=new_id(),
        context=_context(task_id),
        state=state,
        request=_message(task_id, make_text(random, 40)),
        calls=tuple(_call(index, questions[index % len(questions)]) for index in range(fan_out)),
        answer={
            "text": make_text(random, 42),
            "price": random.randrange(10_000),
            "currency": "EUR",
        },
        reply=_message(task_id, make_text(random, 40)),
    )


def _call(index: int, question: str) -> JobCall:
    sub_task_id = new_id()
    return JobCall(sub_task_id, f"call-{index}", _message(sub_task_id, question), new_id())


def _context(task_id: str) -> dict[str, JsonValue]:
    origin = A2AContext(
        context_id="trip-2291",
        session_id="session-7781",
        user_id="user-12",
        reply_to=Address(REPLY_TO),
        requester=REQUESTER,
        call_depth=1,
        user_config={"locale": "en-GB", "currency": "EUR"},
    )
    context = TaskExecutionContext(
        TaskId(task_id), origin, flags={"vip": True}, security_context={"auth_token": "a" * 200}
    )
    return context.to_checkpoint_dict()


def _message(task_id: str, text: str) -> bytes:
    message: dict[str, JsonValue] = {
        "messageId": task_id,
        "role": "ROLE_AGENT",
        "parts": [{"data": {"text": text}}],
        "contextId": "trip-2291",
        "taskId": task_id,
    }
    return json.dumps({"message": message, "metadata": {"userId": "user-12"}}).encode()


class Contender(Protocol):
    """A system that can run jobs with its own database."""

    async def open(self, url: str) -> None:
        """Connect, and create missing tables."""

    async def close(self) -> None:
        """Disconnect."""

    def prepared(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Convert jobs to the input of `run`, in the form in which an agent hands them over. Not
        timed.
        """

    async def run(self, prepared: Any, in_flight: int) -> None:
        """Run all jobs, `in_flight` at a time."""


T = TypeVar("T")


async def run_concurrently(
    width: int, items: Sequence[T], run: Callable[[T], Awaitable[None]]
) -> None:
    """Run `run` for every item, `width` of them at a time."""
    remaining = iter(items)

    async def run_remaining() -> None:
        for item in remaining:
            await run(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(width, len(items))):
            group.create_task(run_remaining())
