"""The same journey in each framework, in a mesh in memory."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from scenario import (
    FRAMEWORKS,
    TOKENS,
    TOOLS,
    Framework,
    Journey,
    Quote,
    Result,
    Says,
    Script,
    Trip,
    Use,
    flights,
    hotels,
    load_framework,
    two_pauses,
    weather,
)

from meshpoint import (
    Failed,
    FailureKind,
    IncompatibleState,
    Ok,
    Outcomes,
    Paused,
    Peer,
    QuestionUpdate,
    StatusUpdate,
    TaskExecutionContext,
    TextDelta,
    agent,
)
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.operations import Operations
from meshpoint.ports.agent import ReadsLog
from meshpoint.testing import TestMesh, crash_matrix
from meshpoint.testing.crash_points import CrashPoint

travel = Peer("travel", Trip, str)
ROME = Trip(city="Rome", days=3)
PLAN = (
    'flights: {"price":120} | clock: noon | weather: sunny | visas: none for Italy'
    ' | hotels: {"price":80}'
)
TURN = 2000
"""Bytes of text in a turn."""
LONG = bool(os.environ.get("MESHPOINT_FRAMEWORKS"))
"""Whether `make frameworks` runs the tests."""
FIRST_TURN = ["call-f", "call-c", "call-w"]


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


def stubs(mesh: TestMesh) -> None:
    mesh.stub(flights).returns(Quote(price=120))
    mesh.stub(hotels).returns(Quote(price=80))
    mesh.stub(weather).returns("sunny")


async def test_a_turn_is_one_pause(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        assert (await mesh.call(travel, ROME)).strip() == PLAN
        assert mesh.stub(flights).requests == [Trip(city="Rome", days=3)]
        assert mesh.stub(hotels).requests == [Trip(city="Rome", days=2)]
        assert mesh.stub(weather).requests == ["Rome"]
    assert journey.model_calls == [1, 2, 3, 4]
    assert journey.tool_calls == {"clock": 1, "visas": 1}
    assert [each.id for each in journey.seen] == [*FIRST_TURN, "call-v", "call-h"]


async def test_results_keep_the_order_of_the_calls(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        mesh.stub(hotels).returns(Quote(price=80))
        task = await mesh.send(travel, ROME)
        await mesh.stub(flights).next_request()
        await mesh.stub(weather).next_request()
        mesh.stub(weather).returns("sunny")
        await mesh.advance(1)
        assert journey.model_calls == [1]
        mesh.stub(flights).returns(Quote(price=120))
        assert (await task.result()).strip() == PLAN


async def test_no_crash_pays_a_model_twice(framework: Framework) -> None:
    journeys = list[Journey]()

    def setup(mesh: TestMesh) -> None:
        stubs(mesh)
        journeys.append(Journey(two_pauses, TOOLS))

    class Latest(Journey):
        """The journey of the current run."""

        def answer(self, answers: int, results: Sequence[Result]) -> Says:
            return journeys[-1].answer(answers, results)

        def use(self, tool: str, *arguments: Any) -> str:
            return journeys[-1].use(tool, *arguments)

    report = await crash_matrix(framework.build(Latest(two_pauses)), ROME, setup=setup)
    assert isinstance(report.outcome, Ok)
    assert report.outcome.value.strip() == PLAN
    assert len(report.runs) > 40
    for run, journey in zip(report.runs, journeys[1:], strict=False):
        extra = Counter(journey.model_calls) - Counter([1, 2, 3, 4])
        again = [each for each in run.repeated if "step 'model'" in each]
        assert len(extra) == len(again), (str(run), journey.model_calls)


@pytest.mark.parametrize(
    ("point", "passes"), [("checkpoint", 1), ("checkpoint", 2), ("resume", 1), ("dispatch", 2)]
)
async def test_a_kill_at_each_pause(framework: Framework, point: CrashPoint, passes: int) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        mesh.crash(before=point, times=passes)
        assert (await mesh.call(travel, ROME)).strip() == PLAN
        assert [len(mesh.stub(each).requests) for each in (flights, hotels)] == [1, 1]
    assert journey.model_calls == [1, 2, 3, 4]


async def test_a_kill_in_a_tool_after_a_model_call(framework: Framework) -> None:
    kills = iter([True])

    def die(country: str) -> str:
        if next(kills, False):
            mesh.crash(before="record")
        return f"none for {country}"

    journey = Journey(two_pauses, {**TOOLS, "visas": die})
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        assert (await mesh.call(travel, ROME)).strip() == PLAN
    assert journey.model_calls == [1, 2, 3, 4]
    assert journey.tool_calls["visas"] == 2


@pytest.mark.parametrize("kind", ["error", "timeout", "undeliverable", "cancelled"])
async def test_a_failure_of_a_peer_goes_to_the_model(framework: Framework, kind: Any) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        mesh.stub(hotels).fails(kind, "no rooms")
        await mesh.call(travel, ROME)
    assert journey.seen[-1].id == "call-h"
    assert f"{kind}: no rooms" in journey.seen[-1].text
    assert journey.model_calls == [1, 2, 3, 4]


async def test_a_silent_peer_goes_to_the_model(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        mesh.stub(weather).returns("sunny")
        mesh.stub(hotels).returns(Quote(price=80))
        task = await mesh.send(travel, ROME)
        await mesh.stub(flights).next_request()
        await mesh.advance(timedelta(seconds=61))
        await task.result()
    assert "timeout" in journey.seen[0].text
    assert journey.seen[2].text == "sunny"


async def test_a_failure_of_a_peer_fails_the_task(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey, on_peer_failure="fail")) as mesh:
        stubs(mesh)
        mesh.stub(hotels).fails("timeout", "no answer")
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT
    assert "hotels" in outcome.message
    assert journey.model_calls == [1, 2, 3]


async def test_the_model_corrects_arguments_that_do_not_fit(framework: Framework) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        arguments: dict[str, Any] = {"city": "Rome", "days": "many" if answers == 0 else 4}
        if answers < 2:
            return Says(uses=(Use("flights", arguments, f"call-{answers}"),))
        return Says("done")

    journey = Journey(script)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        await mesh.call(travel, ROME)
        assert mesh.stub(flights).requests == [Trip(city="Rome", days=4)]
    assert journey.model_calls == [1, 2, 3]
    assert "days" in journey.seen[0].text


@pytest.mark.parametrize("approved", [True, False])
async def test_a_person_approves_a_tool(framework: Framework, approved: bool) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(next(each.text for each in results if each.tool == "book"))
        booking = Use("book", {"offer": "17"}, "call-b")
        return Says(uses=(booking, Use("weather", {"request": "Rome"}, "call-w")))

    journey = Journey(script, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run book with {"offer": 17}?'  # as it is validated
                assert journey.tool_calls == {}
                await task.complete(APPROVAL, Approval(approved=approved, message="too dear"))
        result = await task.result()
    assert ("booked 17" if approved else "too dear") in result
    assert journey.tool_calls["book"] == approved
    assert journey.model_calls == [1, 2]


async def test_a_cancel_stops_a_model_call(framework: Framework) -> None:
    started = asyncio.Event()
    journey = Journey(two_pauses, TOOLS)

    async def wait_forever() -> None:
        started.set()
        await asyncio.Event().wait()

    journey.pause = wait_forever
    async with TestMesh(framework.build(journey)) as mesh:
        task = await mesh.send(travel, ROME)
        await started.wait()
        await task.cancel()
        outcome = await task.outcome()
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED


async def test_own_tools_of_a_turn_run_in_parallel(framework: Framework) -> None:
    both = asyncio.Barrier(2)

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(" ".join(each.text for each in results))
        uses = [Use("visas", {"country": each}, f"call-{each}") for each in ("Italy", "Spain")]
        return Says(uses=tuple(uses))

    journey = Journey(script, TOOLS)

    async def meet() -> None:
        await both.wait()

    journey.meet = meet
    async with TestMesh(framework.build(journey)) as mesh:
        assert (await mesh.call(travel, ROME)).strip() == "none for Italy none for Spain"
    assert journey.tool_calls["visas"] == 2


async def test_text_is_streamed(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey, stream=True)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, ROME)
        updates = [each async for each in task.updates()]
        assert (await task.result()).strip() == PLAN
    text = "".join(each.text for each in updates if isinstance(each, TextDelta))
    assert text.strip() == PLAN
    tools = [each.message for each in updates if isinstance(each, StatusUpdate)]
    assert {"tool": "visas", "state": "called"} in tools
    assert journey.model_calls == [1, 2, 3, 4]


async def test_without_streaming_nothing_is_sent_before_the_result(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey, stream=False)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, ROME)
        updates = [each async for each in task.updates()]
        assert (await task.result()).strip() == PLAN
    assert not [each for each in updates if isinstance(each, TextDelta | StatusUpdate)]


async def test_a_limit_holds_across_pauses(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey, request_limit=3)) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert "3" in outcome.message
    assert journey.model_calls == [1, 2, 3]


async def test_tokens_are_counted_once(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        mesh.crash(after="record")
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Ok)
    usage = outcome.usage
    assert usage.by_model.keys() == {"script"}
    assert usage.by_source.keys() == {"agent"}
    assert usage.total.output == usage.by_model["script"].output == 4 * TOKENS


async def test_a_failed_task_resumes_at_its_last_pause(
    framework: Framework, database_url: str
) -> None:
    """Only the failed request to the model is repeated."""
    is_fixed = False

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers == 3 and not is_fixed:
            raise ValueError("the provider is down")
        return two_pauses(answers, results)

    asked = Counter[str]()

    @agent("flights")
    async def serve_flights(ctx: TaskExecutionContext, trip: Trip) -> Quote:
        asked["flights"] += 1
        return Quote(price=120)

    @agent("hotels")
    async def serve_hotels(ctx: TaskExecutionContext, trip: Trip) -> Quote:
        asked["hotels"] += 1
        return Quote(price=80)

    @agent("weather")
    async def serve_weather(ctx: TaskExecutionContext, city: str) -> str:
        asked["weather"] += 1
        return "sunny"

    journey = Journey(script, TOOLS)
    served: list[Any] = [framework.build(journey), serve_flights, serve_hotels, serve_weather]
    task_id = TaskId(new_id())
    async with (
        local_mesh(*served, db_url=database_url, namespace="frameworks") as mesh,
        Operations(database_url, namespace="frameworks") as operations,
    ):
        failed = await (await mesh.send(travel, ROME, task_id=task_id)).outcome()
        assert isinstance(failed, Failed)
        assert "the provider is down" in failed.message
        is_fixed = True
        await operations.resume(task_id)
        resumed = await operations.wait(task_id)
    assert isinstance(resumed, Ok)
    assert str(resumed.value).strip() == PLAN
    assert journey.model_calls == [1, 2, 3, 4, 4]
    assert asked == {"flights": 1, "hotels": 1, "weather": 1}


def _asks_often(pauses: int) -> Script:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers == pauses:
            return Says("done")
        return Says("x" * TURN, uses=(Use("weather", {"request": "Rome"}, f"call-{answers}"),))

    return script


@pytest.mark.parametrize("pauses", [20, 200] if LONG else [20, 40])
async def test_a_pause_writes_what_was_added(framework: Framework, pauses: int) -> None:
    journey = Journey(_asks_often(pauses), TOOLS)
    built = framework.build(journey, request_limit=pauses + 1)
    task = TaskExecutionContext(TaskId("task"))
    written, state, log = 0, b"", list[bytes]()
    paused = await built.start(task, {"city": "Rome"})
    while isinstance(paused, Paused):
        written += len(paused.append or b"") + (0 if paused.state == state else len(paused.state))
        log = [] if paused.append is None else [*log, paused.append]
        state = paused.state
        outcomes = Outcomes({call.id: Ok("sunny") for call in paused.calls})
        assert isinstance(built, ReadsLog)
        paused = await built.resume_with_log(task, state, log, outcomes)
    assert len(journey.model_calls) == pauses + 1
    assert written < pauses * 2.5 * TURN


async def test_a_history_that_would_lose_a_part_is_refused(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    built, task = framework.build(journey), TaskExecutionContext(TaskId("task"))
    paused = await built.start(task, {"city": "Rome"})
    assert isinstance(paused, Paused)
    outcomes = Outcomes({call.id: Ok("sunny") for call in paused.calls})
    newer = paused.state.replace(built.library.encode(), b"99.1")
    with pytest.raises(IncompatibleState, match=r"99\.1.* would lose messages\.0\.|99\.1.*cannot"):
        await built.resume(task, framework.add_field(newer), outcomes)
    await built.resume(task, newer, Outcomes(dict.fromkeys(outcomes, Failed(FailureKind.ERROR))))


async def test_a_peer_that_is_gone_parks_the_task(framework: Framework) -> None:
    built, task = framework.build(Journey(two_pauses, TOOLS)), TaskExecutionContext(TaskId("task"))
    paused = await built.start(task, {"city": "Rome"})
    assert isinstance(paused, Paused)
    outcomes = Outcomes({call.id: Ok("sunny") for call in paused.calls})
    later = framework.build(Journey(two_pauses, TOOLS), peers=[weather])
    with pytest.raises(IncompatibleState, match="'flights', which is no longer a peer"):
        await later.resume(task, paused.state, outcomes)


async def test_a_damaged_history_parks_the_task(framework: Framework) -> None:
    built, task = framework.build(Journey(two_pauses, TOOLS)), TaskExecutionContext(TaskId("task"))
    with pytest.raises(IncompatibleState, match="the history cannot be read"):
        await built.resume(task, b"{}", Outcomes({"a": Ok(1)}))


async def test_peers_are_discovered_by_their_names(framework: Framework) -> None:
    @agent("flights")
    async def serve_flights(ctx: TaskExecutionContext, trip: Trip) -> Quote:
        """Finds a flight."""
        return Quote(price=100 + trip.days)

    @agent("weather")
    async def serve_weather(ctx: TaskExecutionContext, city: str) -> str:
        return "sunny"

    def script(answers: int, results: Sequence[Result]) -> Says:
        match answers:
            case 0:
                return Says(uses=two_pauses(0, ()).uses)
            case 1:  # the schema is known from the card, but only the peer checks the input
                return Says(uses=(Use("flights", {"days": 3}, "call-2"),))
        return Says(" | ".join(each.text for each in results))

    journey = Journey(script, TOOLS)
    built = framework.build(journey, peers=["fl*", "weather"])
    assert built.peer_patterns == ("fl*", "weather")
    async with local_mesh(built, serve_flights, serve_weather) as mesh:
        plan = await mesh.call(travel, ROME)
    assert plan.startswith('{"price":103} | noon | sunny | ')
    assert "invalid: input of flights: Trip: city: Field required" in plan
    assert journey.offered["flights"] == "Finds a flight."
    assert {"weather", "visas"} <= journey.offered.keys()


async def test_a_crash_keeps_what_was_offered(framework: Framework) -> None:
    @agent("flights")
    async def serve_flights(ctx: TaskExecutionContext, trip: Trip) -> Quote:
        return Quote(price=120)

    journey = Journey(two_pauses, TOOLS)
    built = framework.build(journey, peers=["flights", hotels, weather])
    async with TestMesh(built, serve_flights) as mesh:
        mesh.stub(hotels).returns(Quote(price=80))
        mesh.stub(weather).returns("sunny")
        mesh.crash(after="record", times=3)
        assert (await mesh.call(travel, ROME)).strip() == PLAN
    assert journey.model_calls == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "crash", [{"before": "checkpoint"}, {"after": "record"}, {"before": "resume"}]
)
async def test_a_turn_with_peers_tools_and_an_approval(framework: Framework, crash: Any) -> None:
    """They are one pause, and the results reach the model in the order of its calls."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(" | ".join(f"{each.id} {each.text}" for each in results))
        return Says(
            uses=(
                Use("flights", {"city": "Rome", "days": 3}, "1"),
                Use("visas", {"country": "Italy"}, "2"),
                Use("book", {"offer": 17}, "3"),
                Use("weather", {"request": "Rome"}, "4"),
                Use("clock", {}, "5"),
            )
        )

    journey = Journey(script, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        mesh.crash(**crash)
        task = await mesh.send(travel, ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                await task.complete(APPROVAL, Approval(approved=True))
        plan = str(await task.result())
        asked = [len(mesh.stub(each).requests) for each in (flights, weather)]
    assert plan.strip() == ('1 {"price":120} | 2 none for Italy | 3 booked 17 | 4 sunny | 5 noon')
    assert asked == [1, 1]
    assert journey.model_calls == [1, 2]
    assert journey.tool_calls["book"] == 1


async def test_too_many_calls_of_one_turn_go_back_to_the_model(framework: Framework) -> None:
    served = list[str]()

    @agent("weather")
    async def serve(ctx: TaskExecutionContext, city: str) -> str:
        served.append(city)
        return f"sunny in {city}"

    def script(answers: int, results: Sequence[Result]) -> Says:
        cities = ("Rome", "Oslo", "Bern", "Nice") if not answers else ("Bern", "Nice")
        if answers == 2:
            return Says(" | ".join(each.text for each in results))
        uses = [Use("weather", {"request": each}, f"{answers}-{each}") for each in cities]
        return Says(uses=tuple(uses))

    journey = Journey(script, TOOLS)
    async with local_mesh(framework.build(journey), serve, max_fan_out=2) as mesh:
        plan = await mesh.call(travel, ROME)
    assert plan.startswith("sunny in Rome | sunny in Oslo | ")
    assert plan.strip().endswith(" | sunny in Bern | sunny in Nice")
    assert plan.count("too many calls in one turn") == 2
    assert sorted(served) == ["Bern", "Nice", "Oslo", "Rome"]


async def test_a_tool_that_waits_is_told_what_to_do(framework: Framework) -> None:
    def wait(country: str) -> str:
        weather(country).__await__().__next__()
        return "never"

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("visas", {"country": "Italy"}, "call-v"),))

    journey = Journey(script, {**TOOLS, "visas": wait})
    async with TestMesh(framework.build(journey)) as mesh:
        outcome = await (await mesh.send(travel, ROME)).outcome()
    text = outcome.message if isinstance(outcome, Failed) else str(outcome.value)
    assert "a tool cannot wait: list its peers in durable(peers=[…])" in text
    assert "StatefulAgent" not in text
