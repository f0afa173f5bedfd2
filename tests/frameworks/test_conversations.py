"""Conversations across tasks, in each framework that has them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from scenario import (
    FRAMEWORKS,
    Framework,
    Journey,
    Result,
    Says,
    Trip,
    Use,
    load_framework,
    weather,
)

from meshpoint import (
    ConfigurationError,
    Failed,
    IncompatibleState,
    Mesh,
    Ok,
    Paused,
    Peer,
    TaskExecutionContext,
    TaskFailed,
)
from meshpoint.conversations import ConversationKey, ConversationTurn, SqlConversations
from meshpoint.errors import StoreUnavailable
from meshpoint.model.context import A2AContext
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh, crash_matrix

travel = Peer("travel", Trip, str)
ROME = Trip(city="Rome")
TRIP = "trip-7"
LONG = bool(os.environ.get("MESHPOINT_FRAMEWORKS"))
"""Whether `make frameworks` runs the tests."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


class Conversations:
    """A store in memory, which may be unavailable."""

    def __init__(self) -> None:
        self.turns: dict[ConversationKey, list[ConversationTurn]] = {}
        self.outages = 0

    @property
    def tasks(self) -> list[str]:
        """The tasks that have added a turn."""
        return [turn.task_id for turns in self.turns.values() for turn in turns]

    async def load(
        self, key: ConversationKey, numbers: tuple[int, int] | None = None
    ) -> list[ConversationTurn]:
        await self._answer()
        first, last = numbers or (1, len(self.turns.get(key, [])))
        return [each for each in self.turns.get(key, []) if first <= each.number <= last]

    async def append(
        self,
        key: ConversationKey,
        task_id: str,
        library: str,
        messages: list[JsonValue],
        *,
        replaces: int = 0,
    ) -> None:
        await self._answer()
        turns = self.turns.setdefault(key, [])
        if task_id not in (each.task_id for each in turns):
            stored = json.loads(json.dumps(messages))
            turns.append(ConversationTurn(len(turns) + 1, task_id, library, stored, replaces))

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.outages:
            self.outages -= 1
            raise StoreUnavailable("the store is unavailable")


def all_results(answers: int, results: Sequence[Result]) -> Says:
    """Each task asks the weather, and says everything that the model has received."""
    if answers % 2 == 0:
        return Says(uses=(Use("weather", {"request": "Rome"}, f"call-{answers}"),))
    return Says(" | ".join(each.text for each in results))


def count_answers(answers: int, results: Sequence[Result]) -> Says:
    """Each task says how many answers it sees."""
    return Says(f"{answers}")


async def say(mesh: TestMesh | Mesh, **options: Any) -> str:
    """The result of a task."""
    handle = await mesh.send(travel, ROME, **{"context_id": TRIP, **options})
    return (await handle.result()).strip()


async def test_a_task_sees_the_conversation(framework: Framework) -> None:
    store = Conversations()
    async with TestMesh(framework.build(Journey(all_results), conversations=store)) as mesh:
        mesh.stub(weather).returns("sunny")
        assert await say(mesh, user_id="ada") == "sunny"
        mesh.stub(weather).returns("rain")
        assert await say(mesh, user_id="ada") == "sunny | rain"
        mesh.stub(weather).returns("snow")
        assert await say(mesh, user_id="ada") == "sunny | rain | snow"
        assert await say(mesh, user_id="bob") == "snow"
        assert await say(mesh) == "snow"
        assert await say(mesh, user_id="ada", context_id="trip-8") == "snow"
        count = len(store.tasks)
        handle = await mesh.send(travel, ROME, user_id="ada")
        assert (await handle.result()).strip() == "snow"
        assert len(store.tasks) == count
    sizes = [len(turn.messages) for turn in next(iter(store.turns.values()))]
    assert len(set(sizes)) == 1, "a turn has the messages of its own task only"


async def test_a_stranger_reads_nothing(framework: Framework) -> None:
    """The requester and its login are part of the key."""
    store = Conversations()
    agent = framework.build(Journey(count_answers), conversations=store)

    async def run(task: str, requester: str, login: str | None) -> str:
        origin = A2AContext(context_id=TRIP, requester=requester)
        ctx = TaskExecutionContext(TaskId(task), origin)
        ctx._runtime.login = login
        done = await agent.start(ctx, {"city": "Rome"})
        assert not isinstance(done, Paused)
        return done.output.strip()

    assert await run("1", "app", "ada") == "0"
    assert await run("2", "app", "ada") == "1"
    assert await run("3", "other", "ada") == "0"
    assert await run("4", "app", "eve") == "0"
    assert await run("5", "app", None) == "0"
    assert {key.requester for key in store.turns} == {"app", "other"}


async def test_the_login_reaches_the_key(framework: Framework) -> None:
    store = Conversations()
    async with TestMesh(framework.build(Journey(all_results), conversations=store)) as mesh:
        mesh.stub(weather).returns("sunny")
        await say(mesh)
    (key,) = store.turns
    assert key.login is not None
    assert key.context_id == TRIP


async def test_no_crash_doubles_or_loses_a_turn(framework: Framework) -> None:
    store = Conversations()
    script = all_results if LONG else count_answers
    agent = framework.build(Journey(script), conversations=store)
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).returns("sunny")
        expected = {"0": "1", "sunny": "sunny | sunny"}[await say(mesh, task_id="earlier")]
    ((key, turns),) = store.turns.items()

    def setup(mesh: TestMesh) -> None:
        store.turns = {key: [*turns]}
        mesh.stub(weather).returns("sunny")
        mesh.send = partial(mesh.send, context_id=TRIP)  # type: ignore[method-assign]

    def check(mesh: TestMesh, outcome: Ok[str] | Failed) -> None:
        assert isinstance(outcome, Ok)
        assert outcome.value.strip() == expected
        assert store.tasks == ["earlier", "crash-matrix"]
        first, second = next(iter(store.turns.values()))
        assert len(second.messages) == len(first.messages)

    report = await crash_matrix(agent, ROME, setup=setup, check=check)
    assert len(report.runs) > (30 if LONG else 15)


async def test_concurrent_tasks_see_the_conversation_as_it_was(framework: Framework) -> None:
    store = Conversations()
    agent = framework.build(Journey(all_results), conversations=store)
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).returns("sunny")
        await say(mesh, task_id="a")
    async with TestMesh(agent) as mesh:
        handles = {
            name: await mesh.send(travel, ROME, context_id=TRIP, task_id=name) for name in "bc"
        }
        requests = [await mesh.stub(weather).next_request() for _ in handles]
        assert len(requests) == 2
        mesh.stub(weather).returns("rain")
        for handle in handles.values():
            assert (await handle.result()).strip() == "sunny | rain"
        assert sorted(store.tasks) == ["a", "b", "c"]
        assert await say(mesh) == "sunny | rain | rain | rain"


async def test_a_failed_task_adds_nothing(framework: Framework) -> None:
    store = Conversations()
    agent = framework.build(Journey(all_results), conversations=store, on_peer_failure="fail")
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).fails("error", "closed")
        with pytest.raises(TaskFailed):
            await say(mesh)
    assert store.tasks == []
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).returns("sunny")
        assert await say(mesh) == "sunny"


async def test_a_cancelled_task_adds_nothing(framework: Framework) -> None:
    store = Conversations()
    async with TestMesh(framework.build(Journey(all_results), conversations=store)) as mesh:
        handle = await mesh.send(travel, ROME, context_id=TRIP)
        await mesh.stub(weather).next_request()
        await handle.cancel()
        assert isinstance(await handle.outcome(), Failed)
    assert store.tasks == []


@pytest.mark.parametrize("answered", [0, 1, 2])
async def test_an_unavailable_store_delays_the_task(framework: Framework, answered: int) -> None:
    store = Conversations()
    async with TestMesh(framework.build(Journey(all_results), conversations=store)) as mesh:
        mesh.stub(weather).returns("sunny")
        await say(mesh)
        real, calls = store._answer, 0

        async def answer() -> None:
            nonlocal calls
            calls += 1
            if calls == answered + 1:
                store.outages = 2
            await real()

        store._answer = answer  # type: ignore[method-assign]
        assert await say(mesh) == "sunny | sunny"
    assert len(store.tasks) == 2


async def start(agent: Any, store: Conversations, **origin: Any) -> Any:
    """The first segment of a task."""
    ctx = TaskExecutionContext(TaskId("later"), A2AContext(context_id=TRIP, **origin))
    return await agent.start(ctx, {"city": "Rome"})


async def test_turns_that_would_lose_a_part_are_refused(framework: Framework) -> None:
    store = Conversations()
    agent = framework.build(Journey(lambda *_: Says("fine")), conversations=store)
    await start(agent, store)
    ((key, (turn,)),) = store.turns.items()
    state = json.dumps({"messages": turn.messages}).encode()
    if agent.framework != "openai-agents":  # this SDK sends such a field to the model
        messages = json.loads(framework.add_field(state))["messages"]
        store.turns[key] = [ConversationTurn(1, "a", "9.9", messages)]
        with pytest.raises(IncompatibleState, match=r"written by .*9\.9; .*later_?[fF]ield"):
            await start(agent, store)
    store.turns[key] = [ConversationTurn(1, "a", "9.9", [{"kind": "unknown"}])]
    with pytest.raises(IncompatibleState, match=r"written by .*9\.9; "):
        await start(agent, store)


async def test_damaged_messages_name_their_row(framework: Framework) -> None:
    store = Conversations()
    agent = framework.build(Journey(lambda *_: Says("fine")), conversations=store)
    await start(agent, store)
    ((key, (turn,)),) = store.turns.items()
    for damage in ({"kind": "unknown"}, {"role": 7}, {"type": ["x"]}, 17, None):
        messages: list[Any] = [*turn.messages, damage]
        store.turns[key] = [ConversationTurn(1, "a", turn.library, messages)]
        if damage in (17, None) or agent.framework in {
            "openai-agents",
            "agent-framework",
            "google-adk",
        }:
            place = rf"turn 1 of the conversation, of task a, .*message {len(messages)} "
        else:
            place = "written by"  # its own types refuse it
        with pytest.raises(IncompatibleState, match=place):
            await start(agent, store)


class Refusing(Conversations):
    """A store with a wrong password, or one that does not answer."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def check(self) -> None:
        raise self._error


async def test_a_store_that_refuses_ends_the_replica(framework: Framework) -> None:
    store = Refusing(ConfigurationError("SqlConversations", "wrong password", "correct the URL"))
    agent = framework.build(Journey(count_answers), conversations=store)
    with pytest.raises(ConfigurationError, match="wrong password"):
        async with agent.lifespan():
            pass


async def test_a_store_that_does_not_answer_is_logged(
    framework: Framework, caplog: pytest.LogCaptureFixture
) -> None:
    store = Refusing(StoreUnavailable("the store is unavailable"))
    async with framework.build(Journey(count_answers), conversations=store).lifespan():
        pass
    (message,) = caplog.messages
    assert "tasks with a context_id wait: the store is unavailable" in message


async def test_deleted_turns_fail_a_task_that_has_started_with_them(framework: Framework) -> None:
    store = Conversations()
    agent = framework.build(Journey(all_results), conversations=store)
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).returns("sunny")
        await say(mesh)
    async with TestMesh(agent) as mesh:
        handle = await mesh.send(travel, ROME, context_id=TRIP)
        await mesh.stub(weather).next_request()
        store.turns.clear()
        mesh.stub(weather).returns("rain")
        outcome = await handle.outcome()
    assert isinstance(outcome, Failed)
    assert "turns 1 to 1 of its conversation" in outcome.message


async def test_bytes_of_a_pause_do_not_grow_with_the_conversation(framework: Framework) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        said = all_results(answers, results)
        return said if said.uses else Says("fine")

    store, sizes = Conversations(), list[int]()
    agent = framework.build(Journey(script), conversations=store)
    async with TestMesh(agent) as mesh:
        mesh.stub(weather).returns("x" * 2000)
        for _ in range(4):
            await say(mesh)
            (key,) = store.turns
            origin = A2AContext(context_id=TRIP, requester=key.requester)
            ctx = TaskExecutionContext(TaskId("later"), origin)
            ctx._runtime.login = key.login
            paused = await agent.start(ctx, {"city": "Rome"})
            assert isinstance(paused, Paused)
            sizes.append(len(paused.state))
    assert max(sizes) - min(sizes) < 200, sizes


async def test_messages_that_the_framework_has_shortened_replace_the_turns() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.capabilities import ProcessHistory
    from with_pydantic_ai import PydanticAI

    from meshpoint.frameworks.pydantic_ai import durable

    def shorten(messages: list[Any]) -> list[Any]:
        return messages[-3:]

    store, journey = Conversations(), Journey(count_answers)
    agent = PydanticAI().agent(journey, capabilities=[ProcessHistory(shorten)])
    travel = durable(agent, stream=False, conversations=store)
    async with TestMesh(travel) as mesh:
        said = [await mesh.call(travel, f"hello {number}", context_id=TRIP) for number in range(4)]
    assert said == ["0", "1", "1", "1"]
    (turns,) = store.turns.values()
    assert [(each.number, each.replaces) for each in turns] == [(1, 0), (2, 0), (3, 2), (4, 3)]
    assert [len(each.messages) for each in turns] == [2, 2, 4, 4]


async def test_sql_keeps_the_conversation(framework: Framework, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/conversations.db"
    for expected in ("sunny", "sunny | sunny"):
        agent = framework.build(Journey(all_results), conversations=SqlConversations(url))
        async with TestMesh(agent) as mesh:
            mesh.stub(weather).returns("sunny")
            assert await say(mesh) == expected


def test_a_bad_url_is_one_clear_line() -> None:
    for url in ("nonsense", "mysql://localhost/x", "sqlite://"):
        with pytest.raises(ConfigurationError, match=r"^SqlConversations: .*; use postgresql"):
            SqlConversations(url)
    with pytest.raises(ConfigurationError, match="max_turns is 0"):
        SqlConversations("sqlite:///x.db", max_turns=0)
