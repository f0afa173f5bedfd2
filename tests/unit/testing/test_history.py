"""Replays of exported histories: code that fits or does not, and damaged files."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from meshpoint import (
    Context,
    Done,
    Paused,
    Peer,
    Question,
    Replies,
    StatefulAgent,
    agent,
)
from meshpoint.agents.function import FunctionAgent
from meshpoint.agents.versions import AgentVersions
from meshpoint.engine.history import collect_history
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import TaskId
from meshpoint.testing import ReplayDiffers, TestMesh, replay_history

flights = Peer("flights", str, int)
weather = Peer("weather", str, str)
hotels = Peer("hotels", dict[str, str], str)
approval = Question("approval", bool)
calls = Counter[str]()
asked_ids = list[str]()


def book(city: str) -> str:
    calls["book"] += 1
    return f"booked {city}"


def report(city: str) -> str:
    calls["report"] += 1
    return f"report on {city}"


@agent("travel")
async def travel(ctx: Context, city: str) -> str:
    started, key = ctx.now(), ctx.uuid4()
    booked = await ctx.step("book", book, city)
    price = await flights(city)
    await ctx.sleep(timedelta(hours=1))
    text = await ctx.subtask("report", report, city)
    await ctx.memory.set("price", str(price))
    wait = ctx.wait_for(approval)
    asked_ids.append(wait.id)
    answer = await wait
    draw = ctx.random().random()
    hotel = await hotels({"city": city, "id": str(key), "at": started.isoformat()})
    return f"{booked} {price} {text} {answer} {draw} {hotel} {await ctx.memory.get('price')!r}"


async def export(
    mesh: TestMesh, task_id: str, folder: Path, change: Callable[[Any], None] | None = None
) -> Path:
    history = await collect_history(mesh._store, TaskId(task_id), mesh.now())
    assert history is not None
    data = json.loads(history.to_json())
    if change is not None:
        change(data)
    path = folder / "history.json"
    path.write_text(json.dumps(data))
    return path


async def history_of(
    code: Any, folder: Path, request: Any = "Rome", *, answered: bool = True
) -> Path:
    """Run a task of `code` until its peer `hotels` is asked, and export it."""
    async with TestMesh(code, auto_advance=False) as mesh:
        mesh.stub(flights).returns(120)
        mesh.stub(weather).returns("sunny")
        asked = mesh.stub(hotels)
        await mesh.send(code, request, task_id="order-17")
        await mesh.advance(timedelta(hours=2))
        if answered:
            await mesh.complete(asked_ids[-1], True)
            await mesh.advance(0)
            assert len(asked.requests) == 1
        return await export(mesh, "order-17", folder)


def changed(body: Callable[[Context, str], Any], version: str = "1") -> FunctionAgent[str, str]:
    body.__annotations__ = {"ctx": Context, "city": str, "return": str}
    return FunctionAgent(body, "travel", version=version)


async def test_everything_that_a_function_records_is_replayed(tmp_path: Path) -> None:
    path = await history_of(travel, tmp_path)
    calls.clear()
    replayed = await replay_history(travel, path)
    assert (replayed.agent, replayed.task_id) == ("travel", "order-17")
    assert (replayed.passed, replayed.recorded) == (4, 4)
    assert replayed.stopped_at == "its last pause, which waits for 'hotels'"
    assert str(replayed) == (
        "travel, task order-17: 4 of 4 recorded pauses, up to its last pause, which waits for "
        "'hotels'"
    )
    assert not calls


async def test_a_question_is_where_the_record_ends(tmp_path: Path) -> None:
    path = await history_of(travel, tmp_path, answered=False)
    replayed = await replay_history(travel, path)
    assert (replayed.passed, replayed.recorded) == (3, 3)
    assert replayed.stopped_at == "its last pause, which waits for 'approval'"


async def test_another_peer_differs(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        return await weather(city)

    path = await history_of(travel, tmp_path)
    with pytest.raises(ReplayDiffers) as failure:
        await replay_history(changed(code), path)
    assert str(failure.value) == "replay differs at call 1: expected weather, recorded flights"


async def test_a_new_input_of_the_open_call_is_named(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await flights(city)
        return await hotels({"city": city, "id": str(uuid.uuid4())})

    async def before(ctx: Context, city: str) -> str:
        await flights(city)
        return await hotels({"city": city, "id": "1"})

    path = await history_of(changed(before), tmp_path, answered=False)
    with pytest.raises(ReplayDiffers) as failure:
        await replay_history(changed(code), path)
    text = str(failure.value)
    assert text.startswith("replay differs at call 2 (input.id); test_history.py:")
    assert text.endswith(": uuid.uuid4() → ctx.uuid4()")


async def test_an_older_input_is_compared_by_its_digest(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        return str(await flights(city.upper()))

    path = await history_of(travel, tmp_path)
    with pytest.raises(ReplayDiffers, match=r"^replay differs at call 1: flights.0 has another"):
        await replay_history(changed(code), path)


async def test_a_new_step_before_a_recorded_call_does_not_run(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("pack", book, city)
        return str(await flights(city))

    path = await history_of(travel, tmp_path)
    calls.clear()
    with pytest.raises(
        ReplayDiffers, match=r"^replay differs: step 'pack' before call 1 is not recorded$"
    ):
        await replay_history(changed(code), path)
    assert not calls


async def test_a_new_subtask_before_a_recorded_call_does_not_run(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.subtask("pack", report, city)
        return str(await flights(city))

    path = await history_of(travel, tmp_path)
    calls.clear()
    with pytest.raises(ReplayDiffers, match="subtask 'pack' before call 1 is not recorded"):
        await replay_history(changed(code), path)
    assert not calls


async def test_code_that_ends_early_differs(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        return str(await flights(city))

    path = await history_of(travel, tmp_path)
    with pytest.raises(
        ReplayDiffers, match=r"^replay differs: ended after 1 of 4 recorded calls$"
    ):
        await replay_history(changed(code), path)


async def test_code_that_fails_early_differs(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        await flights(city)
        raise ValueError("no rooms")

    path = await history_of(travel, tmp_path)
    with pytest.raises(
        ReplayDiffers, match=r"^replay fails after 1 of 4 pauses: ValueError: no rooms$"
    ):
        await replay_history(changed(code), path)


async def test_a_swallowed_mismatch_differs(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        with suppress(Exception):
            await weather(city)
        return "fine"

    path = await history_of(travel, tmp_path)
    with pytest.raises(ReplayDiffers, match="expected weather, recorded flights"):
        await replay_history(changed(code), path)


async def test_a_result_that_no_longer_fits_differs(tmp_path: Path) -> None:
    def book_number(city: str) -> int:
        return len(city)

    async def code(ctx: Context, city: str) -> str:
        return str(await ctx.step("book", book_number, city))

    path = await history_of(travel, tmp_path)
    with pytest.raises(ReplayDiffers, match="the recorded result of step 'book' does not fit"):
        await replay_history(changed(code), path)


async def test_code_between_calls_may_change(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        started, key = ctx.now(), ctx.uuid4()
        await ctx.step("book", book, city)
        price = await flights(city) * 2
        await ctx.sleep(timedelta(minutes=1))
        await ctx.subtask("report", report, city)
        await ctx.memory.set("price", str(price))
        await ctx.wait_for(approval)
        at = started.isoformat()
        hotel = await hotels({"city": city, "id": str(key), "at": at})
        return await weather(hotel)

    path = await history_of(travel, tmp_path)
    assert (await replay_history(changed(code), path)).passed == 4


async def test_an_unsupported_format_differs(tmp_path: Path) -> None:
    path = await history_of(travel, tmp_path)
    second = FunctionAgent(travel.function, "travel", version="2")
    with pytest.raises(ReplayDiffers, match="no version of 'travel' reads 'travel/function/1"):
        await replay_history(second, path)
    assert (await replay_history(AgentVersions([second, travel]), path)).passed == 4


async def test_an_interrupted_segment_ends_at_its_first_unrecorded_step(
    tmp_path: Path,
) -> None:
    @agent("travel")
    async def code(ctx: Context, city: str) -> str:
        price = await flights(city)
        await ctx.step("book", book, city)
        await ctx.subtask("report", report, city)
        return str(price)

    async with TestMesh(code, auto_advance=False) as mesh:
        mesh.stub(flights).returns(120)
        await mesh.send(code, "Rome", task_id="order-17")
        mesh.crash(after="record")
        await mesh.advance(0)
        path = await export(mesh, "order-17", tmp_path)
    calls.clear()
    replayed = await replay_history(code, path)
    assert (replayed.passed, replayed.stopped_at) == (
        1,
        "subtask 'report', which is not recorded",
    )
    assert not calls


async def test_a_task_that_began_but_never_paused_is_replayed_from_its_request(
    tmp_path: Path,
) -> None:
    @agent("travel")
    async def code(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        return str(await flights(city))

    async with TestMesh(code, auto_advance=False) as mesh:
        mesh.stub(flights)
        await mesh.send(code, "Rome", task_id="order-17")
        mesh.crash(before="checkpoint")
        await mesh.advance(0)
        path = await export(mesh, "order-17", tmp_path)
    calls.clear()
    replayed = await replay_history(code, path)
    assert (replayed.passed, replayed.recorded) == (0, 0)
    assert replayed.stopped_at == "a new call to 'flights'"
    assert not calls


async def test_a_task_with_all_outcomes_shows_whether_a_fix_helps(tmp_path: Path) -> None:
    async def other(ctx: Context, city: str) -> str:
        return await weather(city)

    async with TestMesh(travel, auto_advance=False) as mesh:
        mesh.stub(flights)
        await mesh.send(travel, "Rome", task_id="order-17")
        await mesh.advance(0)
        path = await export(mesh, "order-17", tmp_path, answer_first)
    with pytest.raises(ReplayDiffers, match="expected weather, recorded flights"):
        await replay_history(changed(other), path)
    replayed = await replay_history(travel, path)
    assert (replayed.passed, replayed.stopped_at) == (1, "a new call to 'sleep'")


class Trip(BaseModel):
    city: str


class Planner(StatefulAgent[str, Trip, str]):
    name = "planner"

    async def on_request(self, ctx: Context, request: str) -> Paused | Done[str]:
        return self.ask(Trip(city=request), {"f": flights(request)}, then=self.on_price)

    async def on_price(self, ctx: Context, state: Trip, replies: Replies) -> Paused | Done[str]:
        calls["on_price"] += 1
        return self.ask(state, {"w": weather(state.city)}, then=self.on_weather)

    async def on_weather(self, ctx: Context, state: Trip, replies: Replies) -> Paused | Done[str]:
        return self.done(state.city)


async def test_a_class_continues_from_its_state_once_it_has_all_outcomes(tmp_path: Path) -> None:
    planner = Planner()

    async with TestMesh(planner, auto_advance=False) as mesh:
        mesh.stub(flights)
        await mesh.send(planner, "Rome", task_id="plan-1")
        await mesh.advance(0)
        waiting = await replay_history(planner, await export(mesh, "plan-1", tmp_path))
        assert waiting.stopped_at == "its last pause, which waits for 'flights'"
        path = await export(mesh, "plan-1", tmp_path, answer_first)
    calls.clear()
    replayed = await replay_history(planner, path)
    assert replayed.stopped_at == "a new call to 'weather'"
    assert calls == {"on_price": 1}

    class Renamed(Planner):
        on_price = None  # type: ignore[assignment]

    with pytest.raises(ReplayDiffers, match="planner has no handler 'on_price'"):
        await replay_history(Renamed(), path)


async def test_the_security_context_is_left_out(tmp_path: Path) -> None:
    @agent("travel")
    async def code(ctx: Context, city: str) -> str:
        ctx.security_context["token"] = "s3cret"
        await flights(city)
        return await hotels({})

    path = await history_of(code, tmp_path, answered=False)
    assert "s3cret" not in path.read_text()
    assert "security_context" not in json.loads(path.read_text())["context"]


def with_outcome(outcome: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        data["calls"][0]["outcome"] = outcome

    return change


def with_flags(flags: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        data["context"]["flags"] = flags

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def replaced(**fields: Any) -> Callable[[Any], None]:
    return lambda data: data.update(fields)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "is not the history of a task"),
        ('{"format": "meshpoint-checkpoint/1"}', "is not the history of a task"),
        ('{"format": "meshpoint-history/2"}', "has the format meshpoint-history/2; this release"),
        ('{"format": "meshpoint-history/1"}', "is damaged: agent: Field required"),
    ],
)
async def test_a_file_that_is_not_a_history_gets_one_clear_line(
    content: str | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "history.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=problem) as failure:
        await replay_history(travel, path)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replaced(pauses=[{"calls": 3}]), "is damaged: entries.0.calls"),
        (replaced(generation="many"), "is damaged: generation"),
        (replaced(agent="hotels"), "is the history of a task of 'hotels'"),
        (replaced(later=1), "is damaged: later: Extra inputs"),
        (replaced(context={"format": 3}), "."),
        (with_flags("x"), "context cannot be read here: dictionary update"),
        (replaced(context={"a2a_context": None}), "context cannot be read here: Input should"),
        (replaced(first_context={"token_usage": None}), "replay fails after 0 of 3 pauses"),
        (with_outcome(True), "is damaged: calls.0: .*its outcome is not one"),
        (with_outcome({}), "is damaged: calls.0: .*its outcome is not one"),
        (with_outcome("\ud800"), "is damaged: calls.0: .*its outcome is not one"),
        (with_outcome({"kind": "x"}), "is damaged: calls.0: .*its outcome is not one"),
        (with_outcome({"kind": "error", "message": 5}), "its outcome is not one"),
        (with_outcome({"value": 1, "usage": 5}), "its outcome is not one"),
        (replaced(state={"base64": "é"}), "is damaged: state: "),
        (replaced(state={"base64": "a%"}), "is damaged: state: "),
        (replaced(log=[{"text": "\ud800"}]), "is damaged: log.0"),
        (replaced(input=nested(300)), "is damaged: input.list.0.list"),
    ],
)
async def test_a_damaged_history_gets_one_clear_line(
    change: Callable[[Any], None], problem: str, tmp_path: Path
) -> None:
    path = await history_of(travel, tmp_path, answered=False)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises((ConfigurationError, ReplayDiffers), match=problem) as failure:
        await replay_history(travel, path)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 600


async def test_a_new_step_after_the_record_does_not_run(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        price = await flights(city)
        return await ctx.step("pay", book, f"{city} {price}")

    async with TestMesh(changed(code), auto_advance=False) as mesh:
        mesh.stub(flights)
        await mesh.send("travel", "Rome", task_id="order-17")
        await mesh.advance(0)
        path = await export(mesh, "order-17", tmp_path, answer_first)
    calls.clear()
    replayed = await replay_history(changed(code), path)
    assert (replayed.passed, replayed.stopped_at) == (1, "step 'pay', which is not recorded")
    assert not calls


def answer_first(data: Any) -> None:
    """Let the first call of the last pause have its outcome."""
    data["task_state"] = "ready"
    data["calls"][0]["outcome"] = {"value": 120}


async def test_a_new_step_whose_refusal_is_swallowed_differs(tmp_path: Path) -> None:
    async def code(ctx: Context, city: str) -> str:
        with suppress(Exception):
            await ctx.step("pack", book, city)
        return str(await flights(city))

    path = await history_of(travel, tmp_path)
    with pytest.raises(ReplayDiffers, match="step 'pack' before call 1 is not recorded"):
        await replay_history(changed(code), path)
