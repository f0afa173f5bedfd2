"""The message for each common mistake of a user, in one table.

`tests/unit/agents/test_agents_mistakes.py` has variants of the mistakes in agent code.
"""

from __future__ import annotations

import asyncio
import gc
import re
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import pytest
from pydantic import BaseModel

from meshpoint import (
    Context,
    Mesh,
    MeshpointError,
    Paused,
    Peer,
    Question,
    StatefulAgent,
    TaskNotFound,
    agent,
)
from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.client import attachment
from meshpoint.client.transport import Transport
from meshpoint.local import local_mesh
from meshpoint.testing import TestMesh

Mistake = Callable[[], Awaitable[str]]


class Trip(BaseModel):
    city: str


class Decision(BaseModel):
    approved: bool


flights = Peer("flights", Trip, int)
forecast = Peer("forecast", Trip, int)
survey = Peer("survey", str, str)
approval = Question("approval", Decision)
ROME, OSLO = Trip(city="Rome"), Trip(city="Oslo")


async def raised(action: Any) -> str:
    """The message of the error that an awaitable, or a function without arguments, raises."""
    with pytest.raises((MeshpointError, TypeError, AssertionError)) as caught:
        await (action() if callable(action) else action)
    return str(caught.value)


async def failure(body: Callable[[Context], Awaitable[Any]]) -> str:
    """The failure of a function agent with this body."""

    @agent("travel")
    async def travel(ctx: Context, trip: Trip) -> None:
        await body(ctx)

    async with TestMesh(travel) as mesh:
        return await raised(mesh.call(travel, ROME))


@agent("purchasing")
async def purchasing(ctx: Context, item: str) -> str:
    decision = await ctx.wait_for(approval, prompt=f"Buy {item}?")
    return str(decision.approved)


@agent("team")
async def team(ctx: Context, item: str) -> str:
    decisions = await ctx.gather(ctx.wait_for(approval), ctx.wait_for("other", Decision))
    return str(decisions)


@asynccontextmanager
async def another_connection(mesh: TestMesh, name: str) -> AsyncIterator[Mesh]:
    broker = mesh._transport._broker
    assert isinstance(broker, InProcessBroker)
    async with Transport(InProcessBroker(broker._exchange), name) as transport:
        yield Mesh(transport)


async def question_of(mesh: Mesh) -> str:
    """The id of the question `approval` of a new task of `team`."""
    task = await mesh.send(team, "milk", task_id="order-17")
    while not (waits := (await task.status()).waits):
        pass
    (question_id,) = [each.question_id for each in waits if each.name == approval.name]
    assert question_id is not None
    return question_id


async def task_without_agent() -> str:
    async with TestMesh(purchasing) as mesh:
        wrong: Any = mesh.task
        return await raised(lambda: wrong("order-17"))


async def attach_under_another_name() -> str:
    async with TestMesh(purchasing) as mesh:
        await mesh.send(purchasing, "milk", task_id="order-17")
        async with another_connection(mesh, "client") as other:
            return await raised(other.task(purchasing, "order-17").result())


async def another_input() -> str:
    @agent("travel")
    async def travel(ctx: Context, trip: Trip) -> None:
        await ctx.sleep(3600)

    async with TestMesh(travel) as mesh:
        await mesh.send(travel, ROME, task_id="order-17")
        async with another_connection(mesh, mesh.name) as other:
            task = await other.send(travel, OSLO, task_id="order-17")
            return await raised(task.result())


async def unknown_id() -> str:
    async with local_mesh(purchasing) as mesh:
        with pytest.raises(TaskNotFound) as caught:
            await mesh.task(purchasing, "order-17").result()
    return str(caught.value)


async def milliseconds() -> str:
    async with TestMesh(purchasing) as mesh:
        return await raised(mesh.send(purchasing, "milk", timeout=86400000))


async def naive_start() -> str:
    async with TestMesh(purchasing) as mesh:
        now = datetime.now()  # noqa: DTZ005  # wrong on purpose
        return await raised(mesh.send(purchasing, "milk", start_at=now))


async def asyncio_gather() -> str:
    async def body(ctx: Context) -> None:
        await asyncio.gather(flights(ROME), forecast(ROME))

    return await failure(body)


async def list_of_calls() -> str:
    async def body(ctx: Context) -> None:
        wrong: Any = ctx.gather
        await wrong([flights(ROME), forecast(ROME)])

    return await failure(body)


async def call_without_await() -> str:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        flights(ROME)
        gc.collect()
    return "; ".join(f"{each.category.__name__}: {each.message}" for each in warned)


async def awaited_agent() -> str:
    wrong: Any = purchasing
    return await raised(lambda: wrong("milk"))


async def await_in_a_class() -> str:
    class Travel(StatefulAgent[Trip, str, int]):
        name = "travel"

        async def on_request(self, ctx: Context, request: Trip) -> Paused:
            await flights(request)
            raise AssertionError

    async with TestMesh(Travel()) as mesh:
        return await raised(mesh.call(Travel(), ROME))


async def await_in_a_script() -> str:
    async def script() -> int:
        return await flights(ROME)

    return await raised(script)


async def swallowed_pause() -> str:
    async def body(ctx: Context) -> None:
        try:
            await flights(ROME)
        except:  # noqa: E722  # wrong on purpose
            ctx.flags = {}

    return await failure(body)


async def second_answer() -> str:
    async with TestMesh(team, auto_advance=False) as mesh:
        question_id = await question_of(mesh)
        await mesh.complete(question_id, Decision(approved=True))
        return await raised(mesh.complete(question_id, Decision(approved=True)))


async def unfit_answer() -> str:
    async with TestMesh(team, auto_advance=False) as mesh:
        question_id = await question_of(mesh)
        return await raised(mesh.complete(question_id, {"approved": "yes"}))


async def random_id() -> str:
    @agent("travel")
    async def travel(ctx: Context, trip: Trip) -> None:
        await flights(trip)
        await flights(Trip(city=str(uuid.uuid4())))

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(flights).returns(1)
        return await raised(mesh.call(travel, ROME))


async def nothing_due() -> str:
    async with TestMesh(purchasing) as mesh:
        return await raised(mesh.call(purchasing, "milk"))


async def no_stub() -> str:
    @agent("trial")
    async def trial(ctx: Context, user: str) -> str:
        return await survey(user)

    async with TestMesh(trial) as mesh:
        return await raised(mesh.call(trial, "ada"))


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (task_without_agent, 'task() needs the agent: mesh.task("travel", "order-17")'),
        (
            attach_under_another_name,
            "task 'order-17' belongs to 'test', this client is 'client': connect(name=\"test\")",
        ),
        (another_input, "task 'order-17' exists with another input (field 'city')"),
        (
            unknown_id,
            "no task 'order-17' of 'purchasing': never sent, or it has ended and its outcome is "
            "not kept (mesh.send keeps outcomes for 7 days, mesh.call need not)",
        ),
        (
            milliseconds,
            "timeout: 86400000 s is 2.7 years; durations are in seconds: timedelta(days=1)",
        ),
        (naive_start, "start_at has no time zone: datetime.now(UTC), or delay="),
        (
            asyncio_gather,
            "peer calls run in the agent's own task: await ctx.gather(flights(t), …)",
        ),
        (list_of_calls, "write ctx.gather(*calls)"),
        (
            call_without_await,
            "RuntimeWarning: peer call 'flights' was never awaited: nothing was sent",
        ),
        (
            awaited_agent,
            "purchasing is an agent: purchasing.peer(t) calls it, purchasing(ctx, t) runs it here",
        ),
        (await_in_a_class, 'return self.ask(state, {"f": flights(x)}, then=…)'),
        (await_in_a_script, "await mesh.call(flights, x)"),
        (swallowed_pause, "this except swallowed a pause: catch Exception"),
        (second_answer, r"'approval' was answered at \d\d:\d\d by 'test'"),
        (unfit_answer, "approval.approved: should be a boolean"),
        (
            random_id,
            r"replay differs at call 2 \(input.city\); test_mistakes.py:\d+: uuid.uuid4\(\) → "
            r"ctx.uuid4\(\)",
        ),
        (nothing_due, "idle: 'purchasing' waits for 'approval': complete it"),
        (no_stub, "'survey' is not served: mesh.stub(survey).returns(…)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_the_message(
    monkeypatch: pytest.MonkeyPatch, mistake: Mistake, expected: str
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.01,))
    message = await mistake()
    assert expected in message or re.search(expected, message), message
