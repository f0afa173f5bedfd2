"""`mypy --strict` accepts correct agents with exact types and rejects each mistake on its line.

One mypy run checks all samples; its cache is kept, so only the first run is slow. A line that mypy
must reject ends in `# E: ` and the error code; it must reject no other line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[3]

PREAMBLE = """\
from dataclasses import dataclass
from datetime import timedelta
from typing import assert_type

from pydantic import BaseModel, TypeAdapter
from typing_extensions import TypedDict

from collections.abc import AsyncIterator
from typing import Any

import meshpoint
from meshpoint import (
    ALL, AT_LEAST, FIRST, Addressable, Context, Done, DurableAgent, Failed, FunctionAgent, Mesh,
    Ok, Paused, Peer, PeerCall, Replies, StatefulAgent, TaskExecutionContext, TaskHandle,
    Update, Waitable, agent,
)


class Query(BaseModel):
    to: str


class Quote(BaseModel):
    price: int


@dataclass
class Report:
    sky: str


class Place(TypedDict):
    city: str


flights = Peer("flights", Query, Quote, timeout=timedelta(seconds=30))
forecast = Peer("forecast", Place, Report)
double = Peer("double", int, int)
either = Peer("either", TypeAdapter[int | str](int | str), list[int])
"""

SAMPLES = {
    "peers": """
assert_type(flights(Query(to="Oslo")), PeerCall[Quote])
assert_type(flights(Query(to="Oslo")).with_artifacts(), PeerCall[Ok[Quote]])
assert_type(forecast({"city": "Oslo"}), PeerCall[Report])
assert_type(either("x"), PeerCall[list[int]])
flights(Report("blue"))  # E: arg-type
flights({"to": "Oslo"})  # E: arg-type
flights()  # E: call-arg
forecast({"city": 1})  # E: typeddict-item
forecast({})  # E: typeddict-item
double("1")  # E: arg-type
either(1.5)  # E: arg-type
wrong: PeerCall[Report] = flights(Query(to="Oslo"))  # E: assignment
Peer("x", Query, Quote, timeout=3, idle_timeout=timedelta(days=1), description="x")
Peer("x", Query, Quote, timeout="3")  # E: arg-type
assert_type(flights.with_options(timeout=None), Peer[Query, Quote])
flights.with_options(timeout=1.5, idle_timeout=timedelta(days=1))
flights.with_options(timeout="1h")  # E: arg-type
FIRST.within(3)
FIRST.within("3")  # E: arg-type
""",
    "calls": """
async def coroutine() -> int:
    return 1

async def function(ctx: TaskExecutionContext, query: Query) -> None:
    assert_type(await flights(query), Quote)
    assert_type(await ctx.outcome(flights(query)), Ok[Quote] | Failed)
    assert_type((await flights(query).with_artifacts()).value, Quote)
    (await flights(query)).cost  # E: attr-defined
    (await ctx.outcome(flights(query))).value  # E: union-attr
    number: int = await flights(query)  # E: assignment
    await query  # E: misc
    await flights  # E: misc
    await ctx.outcome(query)  # E: arg-type
    await ctx.outcome(flights)  # E: arg-type
    await ctx.outcome(coroutine())  # E: arg-type
    wait: Waitable[Quote] = flights(query)
    wait = double(1)  # E: assignment
""",
    "waits": """
approval = meshpoint.Question("approval", Query)

async def function(ctx: TaskExecutionContext, q: Query) -> None:
    await ctx.sleep(1.5)
    await ctx.sleep("1h")  # E: arg-type
    await ctx.sleep_until(3)  # E: arg-type
    assert_type(await ctx.gather(flights(q), ctx.sleep(3)), tuple[Quote, None])
    assert_type(await ctx.wait_for(approval), Query)
    assert_type(await ctx.wait_for("colour", str, timeout=3), str)
    assert_type(ctx.wait_for(approval).id, str)
    assert_type(await ctx.gather(ctx.wait_for(approval), double(1)), tuple[Query, int])
    await ctx.wait_for("colour")  # E: call-overload
    ctx.wait_for(approval, timeout="1h")  # E: call-overload
    number: int = await ctx.wait_for(approval)  # E: arg-type
""",
    "gathers": """
async def function(ctx: TaskExecutionContext, q: Query, several: list[Query]) -> None:
    a, b, c = flights(q), double(1), forecast({"city": "Oslo"})
    assert_type(await ctx.gather(a), tuple[Quote, ...])
    assert_type(await ctx.gather(a, b), tuple[Quote, int])
    assert_type(await ctx.gather(a, b, c), tuple[Quote, int, Report])
    assert_type(await ctx.gather(a, b, c, a), tuple[Quote, int, Report, Quote])
    assert_type(await ctx.gather(a, b, c, a, b), tuple[Quote, int, Report, Quote, int])
    assert_type(await ctx.gather(a, b, c, a, b, c), tuple[Quote, int, Report, Quote, int, Report])
    assert_type(await ctx.gather(a, a, a, a, a, a, a), tuple[Quote, ...])
    assert_type(await ctx.gather(*[flights(query) for query in several]), tuple[Quote, ...])
    assert_type(await ctx.gather_outcomes(a, b), tuple[Ok[Quote] | Failed, Ok[int] | Failed])
    assert_type(
        await ctx.gather_outcomes(a, b, c, a, b, c, join=FIRST),
        tuple[Ok[Quote] | Failed, Ok[int] | Failed, Ok[Report] | Failed,
              Ok[Quote] | Failed, Ok[int] | Failed, Ok[Report] | Failed],
    )
    assert_type(
        await ctx.gather_outcomes(*[flights(query) for query in several], join=AT_LEAST(2)),
        tuple[Ok[Quote] | Failed, ...],
    )
    quote, number = await ctx.gather(a, b)
    quote.price + number
    quote.cost  # E: attr-defined
    number.price  # E: attr-defined
    one, two, three = await ctx.gather(a, b)  # E: misc
    one, two, three = await ctx.gather_outcomes(a, b)  # E: misc
    (await ctx.gather_outcomes(a, b))[0].value  # E: union-attr
    assert_type(await ctx.first(a, b), Quote | int)
    assert_type(await ctx.first(a, b, c), Quote | int | Report)
    assert_type(await ctx.first(a, b, c, a), Quote | int | Report)
    assert_type(await ctx.first(*[flights(query) for query in several]), Quote)
    (await ctx.first(a, c)).price  # E: union-attr
    await ctx.first(a, q)  # E: call-overload
    await ctx.gather([a, b])  # E: call-overload
    await ctx.gather(a, q)  # E: call-overload
    await ctx.gather(a, b, join=FIRST)  # E: call-overload
    await ctx.gather_outcomes(a, join=2)  # E: call-overload
""",
    "functions": """
@agent("travel", version="1")
async def travel(ctx: TaskExecutionContext, query: Query) -> Quote:
    return await flights(query)

assert_type(travel, FunctionAgent[Query, Quote])
served: DurableAgent[Query, Quote] = travel
broader: DurableAgent[Query, BaseModel] = travel
wrong: DurableAgent[Query, Report] = travel  # E: assignment

async def run_here(ctx: Context, query: Query) -> None:
    assert_type(await travel(ctx, query), Quote)
    assert_type(await travel.peer(query), Quote)
    await travel(ctx)  # E: call-arg
    await travel(ctx, Report("blue"))  # E: arg-type

@agent("wrong_answer")
async def wrong_answer(ctx: TaskExecutionContext, query: Query) -> Report:
    return await flights(query)  # E: return-value

@agent("not_async")  # E: arg-type
def not_async(ctx: TaskExecutionContext, query: Query) -> Quote:
    return Quote(price=1)

@agent("no_request")  # E: arg-type
async def no_request(ctx: TaskExecutionContext) -> Quote:
    return Quote(price=1)
""",
    "classes": """
class State(BaseModel):
    query: Query

class Travel(StatefulAgent[Query, State, Quote]):
    name = "travel"

    async def on_request(self, ctx: TaskExecutionContext, request: Query) -> Paused | Done[Quote]:
        calls = {"flight": flights(request), "weather": forecast({"city": request.to})}
        return self.ask(State(query=request), calls, then=self.on_quotes, join=FIRST)

    async def on_quotes(
        self, ctx: TaskExecutionContext, state: State, replies: Replies
    ) -> Done[Quote]:
        assert_type(replies.value("flight", flights), Quote)
        assert_type(replies.outcome("weather", forecast), Ok[Report] | Failed)
        replies.value("flight", flights).cost  # E: attr-defined
        return self.done(replies.value("flight", flights))

served: DurableAgent[Query, Quote] = Travel()
assert_type(Travel(), Travel)

class Wrong(StatefulAgent[Query, State, Quote]):
    name = "wrong"

    async def on_request(
        self, ctx: TaskExecutionContext, request: Report  # E: override
    ) -> Paused | Done[Quote]:
        self.ask(request, {"a": double(1)}, then=self.on_quote)  # E: arg-type
        state = State(query=Query(to=""))
        self.ask(state, {"a": double(1)}, then=self.on_other_state)  # E: arg-type
        self.ask(state, {"a": double}, then=self.on_quote)  # E: dict-item
        self.ask(state, {"a": double(1)})  # E: call-arg
        return self.done(Report("blue"))  # E: arg-type

    async def on_quote(
        self, ctx: TaskExecutionContext, state: State, replies: Replies
    ) -> Done[Quote]:
        return self.done(replies.value("a", double))  # E: arg-type

    async def on_other_state(
        self, ctx: TaskExecutionContext, state: Report, replies: Replies
    ) -> Done[Quote]:
        return self.done(Quote(price=1))
""",
    "callers": """
@agent("quoter")
async def quoter(ctx: TaskExecutionContext, query: Query) -> Quote:
    return Quote(price=1)

class Quoter(StatefulAgent[Query, Query, Quote]):
    name = "quoter"

    async def on_request(self, ctx: TaskExecutionContext, request: Query) -> Done[Quote]:
        return self.done(Quote(price=1))

assert_type(Peer.of(quoter), Peer[Query, Quote])
assert_type(Quoter().peer, Peer[Query, Quote])
target: Addressable[Query, Quote] = quoter
target = flights
target = Quoter()
target = forecast  # E: assignment

async def good(mesh: Mesh) -> None:
    assert_type(await mesh.send(flights, Query(to="Oslo")), TaskHandle[Quote])
    assert_type(await mesh.call(quoter, Query(to="Oslo"), timeout=3, task_id="a"), Quote)
    assert_type(await mesh.call(Quoter(), Query(to="Oslo"), timeout=timedelta(days=1)), Quote)
    assert_type(await mesh.call(forecast, Place(city="Oslo"), metadata={"a": [1]}), Report)
    assert_type(await mesh.call("flights", {"to": "Oslo"}), Any)
    task = await mesh.send(flights, Query(to="Oslo"), user_id="ada", session_id="s")
    assert_type(await task.result(), Quote)
    assert_type(await task.outcome(), Ok[Quote] | Failed)
    assert_type(task.updates(), AsyncIterator[Update])
    async for update in task.updates():
        match update.kind:
            case "status":
                assert_type(update.state in {"working"}, bool)
            case "artifact":
                assert_type(update.artifact["a"] is None, bool)
            case "ended":
                assert_type(update.outcome, Ok[Any] | Failed)
    async with meshpoint.connect("memory://", namespace="demo", name="api") as connected:
        assert_type(connected, Mesh)
    assert_type(await meshpoint.connect(config="mesh.yaml"), Mesh)

async def bad(mesh: Mesh) -> None:
    await mesh.send(flights, "nonsense")  # E: misc
    await mesh.call(quoter, {"to": "Oslo"})  # E: misc
    await mesh.call(Quoter(), Report("blue"))  # E: misc
    await mesh.call(flights(Query(to="Oslo")))  # E: call-overload
    await mesh.call(flights)  # E: call-overload
    await mesh.call(flights, Query(to="Oslo"), timeout="1h")  # E: call-overload
    await mesh.call(flights, Query(to="Oslo"), task_id=17)  # E: call-overload
    await mesh.call(flights, Query(to="Oslo"), start_at=1)  # E: call-overload
    await mesh.call(3, Query(to="Oslo"))  # E: call-overload
    number: int = await mesh.call(flights, Query(to="Oslo"))  # E: arg-type
    task = await mesh.send(flights, Query(to="Oslo"))
    (await task.result()).cost  # E: attr-defined
    (await task.outcome()).value  # E: union-attr
    await task.cancel("sold out")  # E: call-arg
    meshpoint.connect(url="memory://")  # E: call-arg
""",
    "handles": """
approval = meshpoint.Question("approval", Query)

async def good(mesh: Mesh) -> None:
    task = mesh.task(flights, "order-17")
    assert_type(task, TaskHandle[Quote])
    assert_type(mesh.task("flights", "order-17"), TaskHandle[Any])
    status = await task.status()
    assert_type(status, meshpoint.TaskStatus)
    assert_type([wait.question_id for wait in status.waits], list[str | None])
    assert_type(status.is_served, bool)
    await task.complete(approval, Query(to="Oslo"))
    await task.complete(approval, Query(to="Oslo"), question_id="id")
    await mesh.complete("id", Query(to="Oslo"))
    await mesh.reject("id", "too expensive")
    await mesh.send(flights, Query(to="Oslo"), task_id="a", if_exists="reject")

async def bad(mesh: Mesh) -> None:
    task = mesh.task(flights, "order-17")
    mesh.task("order-17")  # E: call-overload
    mesh.task(flights, 17)  # E: call-overload
    await task.complete(approval, "yes")  # E: misc
    await task.complete(approval)  # E: call-arg
    await task.complete("approval", Query(to="Oslo"))  # E: arg-type
    await task.complete(approval, Query(to="Oslo"), "id")  # E: call-arg
    await mesh.complete(approval, Query(to="Oslo"))  # E: arg-type
    await mesh.reject("id")  # E: call-arg
    await mesh.reject("id", 3)  # E: arg-type
    await mesh.send(flights, Query(to="Oslo"), if_exists="replace")  # E: call-overload
    (await task.status()).questions  # E: attr-defined
    state: int = (await task.status()).state  # E: assignment
    task.updates(after=3)  # E: arg-type
    wrong: TaskHandle[Report] = task  # E: assignment
""",
    "questions": """
approval = meshpoint.Question("approval", Query)

async def function(ctx: Context, replies: Replies) -> None:
    wait = ctx.wait_for(approval)
    assert_type(wait, meshpoint.QuestionWait[Query])
    wait.id = "mine"  # E: misc
    other: meshpoint.QuestionWait[Report] = wait  # E: assignment
    base: meshpoint.QuestionWait[BaseModel] = wait
    assert_type(replies.value("a", approval), Query)
    assert_type(replies.outcome("a", approval), Ok[Query] | Failed)
    replies.value("a", approval).price  # E: attr-defined
    replies.value("a", "approval")  # E: arg-type
    meshpoint.Question("approval")  # E: call-arg
    meshpoint.Question("approval", "text")  # E: arg-type
""",
    "tests": """
from meshpoint.testing import TestMesh, crash_matrix

@agent("quoter")
async def quoter(ctx: TaskExecutionContext, query: Query) -> Quote:
    return await flights(query)

async def good() -> None:
    async with TestMesh(quoter, always_replay=True) as mesh:
        assert_type(mesh, TestMesh)
        mesh.stub(flights).returns(Quote(price=1))
        mesh.stub(flights).fails("timeout", times=2)
        mesh.crash(after="checkpoint")
        await mesh.advance(timedelta(days=3))
        assert_type(await mesh.call(quoter, Query(to="Oslo")), Quote)
    await crash_matrix(quoter, Query(to="Oslo"))

async def bad(mesh: TestMesh) -> None:
    TestMesh("quoter")  # E: arg-type
    mesh.stub(flights).returns(Report("blue"))  # E: arg-type
    mesh.stub(flights).returns(1)  # E: arg-type
    mesh.stub(flights).fails("tired")  # E: arg-type
    mesh.crash(after="checkpoints")  # E: arg-type
    await mesh.advance("3 days")  # E: arg-type
    await crash_matrix(quoter, Report("blue"))  # E: misc
    await mesh.call(quoter, "Oslo")  # E: misc
""",
}

Found = dict[str, set[tuple[int, str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Lines and error codes that mypy rejects, by sample."""
    folder = tmp_path_factory.mktemp("samples")
    for name, sample in SAMPLES.items():
        (folder / f"sample_{name}.py").write_text(PREAMBLE + sample)
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache" / "samples"
    options = [
        "--config-file",
        str(config),
        "--cache-dir",
        str(cache),
        "--no-error-summary",
        "--hide-error-context",
    ]
    report, trouble, _ = api.run([*options, *map(str, sorted(folder.iterdir()))])
    assert trouble == ""
    errors: Found = {name: set() for name in SAMPLES}
    for line in report.splitlines():
        if refused := re.match(r".*sample_(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", line):
            errors[refused[1]].add((int(refused[2]), refused[3]))
        else:
            assert ": note: " in line, f"unexpected output of mypy: {line}"
    return errors


@pytest.mark.parametrize("name", SAMPLES)
def test_mypy_refuses_exactly_the_wrong_lines(found: Found, name: str) -> None:
    lines = (PREAMBLE + SAMPLES[name]).splitlines()
    marked = ((number, re.search(r"# E: ([\w-]+)$", line)) for number, line in enumerate(lines, 1))
    expected = {(number, mark[1]) for number, mark in marked if mark}
    assert expected
    assert found[name] == expected
