"""Peers that a replica discovers: whose cards it keeps, which it offers, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, create_model

from fake_peer import FakePeer
from meshpoint import AgentCard, Context, Failed, Ok, agent
from meshpoint.agents.discovery import offer_peers, peer_of_card
from meshpoint.engine import peer_directory
from meshpoint.engine.peer_directory import Directory
from meshpoint.errors import ConfigurationError
from meshpoint.model.envelopes import card_message, describe_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, new_id
from meshpoint.model.messages import (
    CARDS,
    DESCRIBE_ALL,
    Address,
    Message,
    MessageType,
    describe_topic,
    private_queue,
)
from meshpoint.ports.broker import Delivery

from .agents import Gate
from .cells import IsolatedRuns
from .mesh import Mesh, RunningReplica
from .test_crash_points import crash_replica_at
from .test_poison import LEASE, make_suspects

PLANNER = AgentName("planner")


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in memory need no second. So short a timer is work in progress: `idle` waits."""
    monkeypatch.setattr(peer_directory, "_COLLECT_SECONDS", 0.02)
    monkeypatch.setattr(peer_directory, "_QUIET_SECONDS", 0.02)


def planner(*patterns: str) -> Any:
    """An agent that calls all peers in each turn, and returns which it was offered."""

    @agent("planner")
    async def plan(ctx: Context, turns: int) -> list[list[str]]:
        seen = []
        for turn in range(turns):
            cards = await offer_peers(ctx, patterns)
            calls = [peer_of_card(card)(turn) for card in cards]
            outcomes = await ctx.gather_outcomes(*calls) if calls else ()
            seen.append(
                [
                    f"{card.name}/{card.version}: {_tell(outcome)}"
                    for card, outcome in zip(cards, outcomes, strict=True)
                ]
            )
        return seen

    agent_: Any = plan
    agent_.peer_patterns = patterns
    return agent_


def _tell(outcome: Ok[Any] | Failed) -> str:
    return outcome.kind.value if isinstance(outcome, Failed) else str(outcome.value)


def server(name: str, version: str = "1", fields: int = 0) -> Any:
    """An agent that adds one. It has an input with so many optional fields."""

    @agent(name, version=version)
    async def serve(ctx: Context, number: int | dict[str, int]) -> int:
        """Add one."""
        return (number if isinstance(number, int) else sum(number.values())) + 1

    if fields:
        model: type[BaseModel] = create_model(
            f"Input{fields}",
            **{f"f{each}": (int, 0) for each in range(fields)},  # type: ignore[call-overload]
        )
        serve.card = AgentCard(  # type: ignore[attr-defined]
            name=name, version=version, input_schema=model.model_json_schema()
        )
    return serve


def offered(replica: RunningReplica, *patterns: str) -> list[str]:
    """The names and versions that the replica offers now."""
    directory = replica.worker.runtime.directory
    assert directory is not None
    return [f"{card.name}/{card.version}" for card in directory.cards(patterns)]


def directory_of(replica: RunningReplica) -> Directory:
    directory = replica.worker.runtime.directory
    assert isinstance(directory, Directory)
    return directory


async def a_round(mesh: Mesh, count: int = 1) -> None:
    """Let every replica ask for cards `count` times."""
    for _ in range(count):
        mesh.clock.advance(timedelta(seconds=73))
        await mesh.idle()


async def test_a_named_peer_is_offered_with_its_card(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_directory, "_COLLECT_SECONDS", 3600.0)  # ends with the answer
    await mesh.replica(server("flights", "3"), server("hotels"))
    await mesh.replica(planner("flights"))
    assert await mesh.ask("planner", 1) == Ok([["flights/3: 1"]])
    assert "has sent no card" not in caplog.text


async def test_a_pattern_offers_all_others_that_match(mesh: Mesh) -> None:
    await mesh.replica(server("hotel-a"), server("hotel-b"), server("flights"))
    some, everyone = planner("hotel-*"), planner("*", "planner")
    assert offered(await mesh.replica(some), "hotel-*") == ["hotel-a/1", "hotel-b/1"]
    replica = await mesh.replica(everyone)
    assert offered(replica, "*") == ["flights/1", "hotel-a/1", "hotel-b/1"]
    assert offered(replica, "planner") == ["planner/1"]


async def test_peers_may_start_later(mesh: Mesh) -> None:
    replica = await mesh.replica(planner("flights", "hotel-*"))
    assert await mesh.ask("planner", 1) == Ok([[]])
    await mesh.replica(server("flights"), server("hotel-a"), server("trains"))
    assert offered(replica, "flights", "hotel-*") == ["flights/1", "hotel-a/1"]


async def test_the_settings_narrow_what_the_code_asks_for(mesh: Mesh) -> None:
    await mesh.replica(server("flights"), server("hotel-a"), server("hotel-test"), server("bank"))
    replica = await mesh.replica(
        planner("*"), peers=("flights", "hotel-*"), denied_peers=("*-test",)
    )
    assert offered(replica, "*") == ["flights/1", "hotel-a/1"]
    assert offered(replica, "bank", "hotel-test") == []


async def test_without_patterns_the_settings_decide(mesh: Mesh) -> None:
    await mesh.replica(server("flights"), server("hotels"))
    assert await _asked_topics(mesh, planner(), peers=("hotels", "trains")) == [
        "hotels.describe",
        "trains.describe",
    ]
    assert await mesh.ask("planner", 1) == Ok([["hotels/1: 1"]])


async def _asked_topics(mesh: Mesh, agent: Any, **options: Any) -> list[str]:
    """The topics of the questions of a new replica."""
    asked: list[str] = []
    announce = mesh.exchange.subscribers

    def record(topic: Any) -> Any:
        asked.append(topic)
        return announce(topic)

    mesh.exchange.subscribers = record  # type: ignore[method-assign]
    await mesh.replica(agent, **options)
    mesh.exchange.subscribers = announce  # type: ignore[method-assign]
    return sorted({topic for topic in asked if topic.endswith(".describe")})


@pytest.mark.parametrize(
    ("patterns", "options", "topics"),
    [
        ([], {}, []),
        (["flights", "hotels"], {}, ["flights.describe", "hotels.describe"]),
        (["flights", "hotel-*"], {}, ["*.describe"]),
        (["*"], {"peers": ("flights",)}, ["flights.describe"]),
        (["flights", "bank"], {"denied_peers": ("bank",)}, ["flights.describe"]),
    ],
)
async def test_only_needed_questions_are_asked(
    mesh: Mesh, patterns: list[str], options: dict[str, Any], topics: list[str]
) -> None:
    assert await _asked_topics(mesh, planner(*patterns), **options) == topics


async def test_the_card_of_the_replica_that_started_last_counts(mesh: Mesh) -> None:
    planning = await mesh.replica(planner("flights"))
    await mesh.replica(server("flights", "1"))
    mesh.clock.advance(timedelta(seconds=5))
    new = await mesh.replica(server("flights", "2"))
    assert offered(planning, "flights") == ["flights/2"]
    await a_round(mesh, 3)
    assert offered(planning, "flights") == ["flights/2"]
    mesh.clock.advance(timedelta(seconds=5))
    await mesh.replica(server("flights", "1"))  # rolled back
    assert offered(planning, "flights") == ["flights/1"]
    await new.drain()


async def test_a_version_whose_replicas_are_gone_gives_way_to_those_that_answer(
    mesh: Mesh,
) -> None:
    planning = await mesh.replica(planner("flights"))
    await mesh.replica(server("flights", "1"))
    mesh.clock.advance(timedelta(seconds=5))
    await (await mesh.replica(server("flights", "2"))).crash()
    await a_round(mesh)
    assert offered(planning, "flights") == ["flights/2"]
    await a_round(mesh, 3)
    assert offered(planning, "flights") == ["flights/1"]


async def test_a_peer_that_is_gone_is_forgotten_after_eleven_rounds(mesh: Mesh) -> None:
    planning = await mesh.replica(planner("*"))
    flights = await mesh.replica(server("flights"))
    await flights.crash()
    await a_round(mesh, 10)
    assert offered(planning, "*") == ["flights/1"]
    await a_round(mesh)
    assert offered(planning, "*") == []


async def test_questions_for_new_patterns_count_no_missing_answers(mesh: Mesh) -> None:
    """No time has passed in which the peer could have restarted."""
    planning = await mesh.replica(planner("*"))
    await (await mesh.replica(server("flights"))).crash()
    for number in range(15):
        directory_of(planning).follow([f"peer-{number}"])
        await mesh.idle()
    assert offered(planning, "*") == ["flights/1"]


async def test_a_replica_that_receives_nothing_forgets_no_peer(mesh: Mesh) -> None:
    """It can ask, but has lost the consumer of its private queue."""
    planning = await mesh.replica(planner("*"))
    await (await mesh.replica(server("flights"))).crash()
    planning.broker.locked_addresses.add("private")
    await a_round(mesh, 12)
    assert offered(planning, "*") == ["flights/1"]


@pytest.mark.parametrize("pattern", ["hotels", "hotel*"])
async def test_a_new_pattern_is_ready_once_it_was_asked_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """The answers to earlier questions do not count, and neither does their end."""
    monkeypatch.setattr(peer_directory, "_COLLECT_SECONDS", 3600.0)  # ends with the answers
    monkeypatch.setattr(peer_directory, "_READY_SECONDS", 3600.0)
    planning = await mesh.replica(planner("flights"))
    directory = directory_of(planning)
    directory.follow([pattern])  # while the first question waits for its answer
    flights = card_message(AgentName("flights"), a_card("flights"))
    directory.receive(flights)
    await mesh.idle()
    waiting = asyncio.create_task(directory.wait_ready())
    await mesh.idle()
    assert not waiting.done()
    directory.receive(flights)
    await mesh.replica(server("hotels"))
    await waiting
    assert offered(planning, "hotels") == ["hotels/1"]


async def test_patterns_are_bounded(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_directory, "_MAX_PATTERNS", 3)
    planning = await mesh.replica(planner("flights"))
    directory = directory_of(planning)
    directory.follow(["flights", "hotels", "trains"])
    for _ in range(2):
        directory.follow(["ships"])
    assert caplog.text.count("more than 3 patterns of peers") == 1
    await mesh.replica(server("trains"), server("ships"))
    assert offered(planning, "trains", "ships") == ["trains/1"]
    for number in range(9):
        directory.cards([f"peer-{number}"])
        assert len(directory._offers) <= 3


async def test_a_login_that_may_not_subscribe_discovers_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> None:
        raise ConfigurationError("mesh.broker_url", "may not bind", "grant it that")

    planning = await mesh.launch(planner("flights"))
    with monkeypatch.context() as patched:
        patched.setattr(planning.broker, "subscribe", refuse)
        await mesh.events.wait(Step.STARTED, replica=planning.id)
        await a_round(mesh, 2)
    assert caplog.text.count("peers cannot be discovered") == 1
    await mesh.replica(server("flights"))
    await a_round(mesh)
    assert offered(planning, "flights") == ["flights/1"]
    assert mesh.events.matching(Step.DEFECT) == []


async def test_an_outage_of_the_broker_forgets_no_peer(mesh: Mesh) -> None:
    planning = await mesh.replica(planner("*"))
    await mesh.replica(server("flights"))
    for replica in mesh.replicas:
        replica.broker.unavailable = True
    await a_round(mesh, 20)
    for replica in mesh.replicas:
        replica.broker.unavailable = False
    assert offered(planning, "*") == ["flights/1"]
    await a_round(mesh, 2)
    assert offered(planning, "*") == ["flights/1"]


@pytest.mark.parametrize("step", [Step.CHECKPOINT, Step.CLAIM])
async def test_a_turn_is_replayed_with_the_cards_of_then(mesh: Mesh, step: Step) -> None:
    """The peer changes while its caller is dead, before or after the first pause."""
    flights = await mesh.replica(server("flights", "1"))
    planning = await mesh.replica(planner("flights"))
    crash_replica_at(mesh, planning, step, Phase.BEFORE)
    async with mesh.client() as client:
        task = await client.send("planner", 2)
        await mesh.idle()
        await planning.crash()
        mesh.clock.advance(timedelta(seconds=5))
        await mesh.replica(server("flights", "2"))
        await flights.crash()
        await mesh.replica(planner("flights"))
        await mesh.advance(60)
        assert (await task).outcome == Ok([["flights/1: 1"], ["flights/2: 2"]])


async def test_a_peer_whose_queues_are_gone_is_an_outcome(mesh: Mesh) -> None:
    flights = await mesh.replica(server("flights"))
    await mesh.replica(planner("*"), undeliverable_after=timedelta(seconds=5))
    await flights.crash()
    for address in [each for each in mesh.exchange.queues if each.startswith("flights.")]:
        del mesh.exchange.queues[address]
    async with mesh.client() as client:
        task = await client.send("planner", 1)
        await mesh.idle()
        await mesh.advance(30)
        assert (await task).outcome == Ok([["flights/1: undeliverable"]])


async def test_twenty_agents_join_leave_and_change_while_tasks_run(mesh: Mesh) -> None:
    """A call to an absent peer fails after a while; the task continues."""
    options: dict[str, Any] = {
        "peer_timeout": timedelta(seconds=8),
        "peer_refresh": timedelta(seconds=10),
    }
    planning = [await mesh.replica(planner("*"), **options) for _ in range(2)]
    running: dict[str, RunningReplica] = {}
    for number in range(20):
        running[f"peer-{number:02}"] = await mesh.replica(server(f"peer-{number:02}", fields=1))
    async with mesh.client() as client:
        tasks = []
        for turn in range(12):
            tasks.append(await client.send("planner", 3))
            name = f"peer-{turn:02}"
            await running[name].crash()
            mesh.clock.advance(timedelta(seconds=1))
            if turn % 3:  # with another schema; the others stay away
                running[name] = await mesh.replica(server(name, str(turn), fields=turn + 1))
            await mesh.advance(5)
            if turn == 6:
                await planning[0].crash()
        await mesh.advance(60)
        outcomes = [(await task).outcome for task in tasks]
    away = {"peer-00", "peer-03", "peer-06", "peer-09"}
    turns: list[Any] = []
    for outcome in outcomes:
        assert isinstance(outcome, Ok)
        assert isinstance(outcome.value, list)
        turns += outcome.value
    assert len(turns) == 36
    assert {len(turn) for turn in turns} <= set(range(16, 21))
    await a_round(mesh, 12)
    now = offered(planning[1], "*")
    assert [name.split("/")[0] for name in now] == sorted(set(running) - away)
    assert {"peer-11/11", "peer-19/1"} <= set(now)


class Listener:
    """A private queue of a stranger, which may send anything."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh, self.name = mesh, AgentName(name)
        self.messages: list[Message] = []
        self.address = private_queue(self.name, ReplicaId("listener"))
        self._broker = mesh.exchange

    def __call__(self, delivery: Delivery) -> None:
        self.messages.append(delivery.message)

    async def ask(self, topic: Any, **changes: Any) -> None:
        """Ask for cards."""
        message = replace(describe_message(self.name, self.address), **changes)
        for queue in self._mesh.exchange.subscribers(topic):
            self._mesh.exchange.put(queue, message)
        await self._mesh.idle()

    async def send(self, body: bytes, **changes: Any) -> None:
        """Announce a card."""
        message = replace(card_message(self.name, body), **changes)
        for queue in self._mesh.exchange.subscribers(CARDS):
            self._mesh.exchange.put(queue, message)
        await self._mesh.idle()

    def cards(self) -> list[Any]:
        """The cards that arrived, each in its message."""
        return [
            json.loads(message.body)
            for message in self.messages
            if message.type is MessageType.CARD
        ]


async def a_listener(mesh: Mesh, name: str = "console") -> Listener:
    listener = Listener(mesh, name)
    peer = await mesh.fake_peer(name)
    await peer._broker.declare(listener.name, ReplicaId("listener"))
    await peer._broker.consume(listener.address, 10_000, listener)
    return listener


async def test_every_replica_answers_a_question(mesh: Mesh) -> None:
    await mesh.replica(server("flights", "1"), server("flights", "2"), server("hotels"))
    listener = await a_listener(mesh)
    await listener.ask(describe_topic(AgentName("flights")), correlation_id="q-1")
    assert [card["card"]["version"] for card in listener.cards()] == ["1", "2"]
    assert {message.correlation_id for message in listener.messages} == {"q-1"}
    assert {card["appVersion"] for card in listener.cards()} == {
        replica.worker.runtime.replica.version for replica in mesh.replicas[:2]
    }
    await listener.ask(DESCRIBE_ALL)
    assert len(listener.cards()) == 5


async def test_questions_with_a_strange_address_are_dropped_without_a_dead_letter(
    mesh: Mesh,
) -> None:
    await mesh.replica(server("flights"), peer_logins={"console": "console-login"})
    listener = await a_listener(mesh)
    other = await a_listener(mesh, "other")
    await other.ask(DESCRIBE_ALL, reply_to=listener.address)
    await other.ask(DESCRIBE_ALL, reply_to=None)
    await other.ask(DESCRIBE_ALL, reply_to=Address("other.private.gone"))
    await listener.ask(DESCRIBE_ALL)  # under no login
    assert listener.cards() == other.cards() == []
    assert mesh.dead_letters("flights") == []
    await other.ask(DESCRIBE_ALL)
    assert len(other.cards()) == 1


async def test_a_flood_of_questions_is_answered_slowly(mesh: Mesh) -> None:
    await mesh.replica(server("flights"))
    flood, honest = await a_listener(mesh, "flood"), await a_listener(mesh, "honest")
    for _ in range(1_000):
        await flood.ask(DESCRIBE_ALL)
    await honest.ask(DESCRIBE_ALL)
    assert (len(flood.cards()), len(honest.cards())) == (5, 1)


def a_card(name: str, replica: str = "", second: int = 5, **changes: Any) -> bytes:
    card = {"name": name, "version": "9", **changes}
    started_at = f"2026-01-02T03:04:{second:02}Z"
    return json.dumps(
        {"card": card, "replica": replica or new_id(), "startedAt": started_at}
    ).encode()


@pytest.mark.parametrize(
    "body",
    [
        a_card("flights", description="x" * 10_000_000),
        a_card("hotels"),
        a_card("flights", inputSchema={"$ref": "https://evil.example"}),
        b"[" * 50_000,
        b"",
    ],
    ids=["10 MB", "another agent", "remote schema", "deep", "empty"],
)
async def test_a_lying_peer_is_refused_and_logged_once(
    mesh: Mesh, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    planning = await mesh.replica(planner("*"))
    liar = await a_listener(mesh, "flights")
    await mesh.replica(server("hotels"))
    for _ in range(3):
        await liar.send(body)
    assert offered(planning, "*") == ["hotels/1"]
    assert mesh.dead_letters("planner") == []
    assert caplog.text.count("the card of flights is refused") == 1
    await liar.send(a_card("flights"))
    assert offered(planning, "*") == ["flights/9", "hotels/1"]


async def test_a_card_under_a_wrong_login_is_refused(mesh: Mesh) -> None:
    planning = await mesh.replica(planner("*"), peer_logins={"flights": "flights-login"})
    liar = await a_listener(mesh, "flights")
    await liar.send(a_card("flights"), user_id="other-login")
    assert offered(planning, "*") == []
    await liar.send(a_card("flights"), user_id="flights-login")
    assert offered(planning, "*") == ["flights/9"]


async def test_ten_thousand_agents_are_bounded(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    planning = await mesh.replica(planner("*", "zebra"))
    listener = await a_listener(mesh)
    directory = directory_of(planning)
    for number in range(10_000):
        name = f"agent-{number:05}"
        directory.receive(card_message(AgentName(name), a_card(name)))
    assert len(directory._known) == 1_000
    assert len(directory.cards(["*"])) == 100
    await listener.send(a_card("zebra"), app_id="zebra")
    assert offered(planning, "zebra") == ["zebra/9"]
    assert caplog.text.count("too many cards") == 1
    assert caplog.text.count("only the first 100 are offered") == 1


async def test_the_bytes_and_replicas_of_cards_are_bounded(mesh: Mesh) -> None:
    directory = directory_of(await mesh.replica(planner("*")))
    for number in range(1_200):
        name = f"agent-{number % 30}"
        large = a_card(name, inputSchema={"description": "x" * 60_000})
        directory.receive(card_message(AgentName(name), large))
    sizes = [served.size for known in directory._known.values() for served in known.values()]
    assert sum(sizes) == directory._size <= 64 * 1024 * 1024
    for _ in range(200):
        directory.receive(card_message(AgentName("small"), a_card("small")))
    assert max(len(replicas) for replicas in directory._known.values()) <= 50


async def test_an_agent_that_is_known_is_not_too_many(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_directory, "MAX_AGENTS", 1)
    planning = await mesh.replica(planner("*"))
    directory = directory_of(planning)
    for name, version in (("flights", "1"), ("hotels", "1"), ("flights", "2")):
        card = a_card(name, second=int(version), version=version)
        directory.receive(card_message(AgentName(name), card))
    assert offered(planning, "*") == ["flights/2"]


async def test_the_latest_card_of_a_replica_counts(mesh: Mesh) -> None:
    """Agents in another language may send another card, or one with another time."""
    planning = await mesh.replica(planner("*"))
    directory = directory_of(planning)
    for replica, second, version, expected in (
        ("a", 1, "1", "1"),
        ("a", 1, "2", "2"),
        ("b", 2, "3", "3"),
        ("a", 3, "2", "2"),
        ("c", 3, "4", "4"),  # of two that started together, the greater id counts
        ("b", 3, "3", "4"),
    ):
        card = a_card("flights", replica, second, version=version)
        directory.receive(card_message(AgentName("flights"), card))
        assert offered(planning, "*") == [f"flights/{expected}"]


async def test_a_replica_that_answers_has_missed_no_question(mesh: Mesh) -> None:
    directory = directory_of(await mesh.replica(planner("flights")))
    await mesh.replica(server("flights"))
    await a_round(mesh, 3)
    assert [served.missed for served in directory._known["flights"].values()] == [0]


async def test_a_dropped_card_no_longer_counts(mesh: Mesh) -> None:
    directory = directory_of(await mesh.replica(planner("flights")))
    await (await mesh.replica(server("flights"))).crash()
    assert directory._size > 0
    await a_round(mesh, 12)
    assert (directory._known, directory._size) == ({}, 0)


async def test_cards_that_nobody_follows_are_ignored(mesh: Mesh) -> None:
    replica = await mesh.replica(planner("flights"))
    directory = directory_of(replica)
    directory.receive(card_message(AgentName("hotels"), a_card("hotels")))
    assert directory._known == {}


async def test_an_agent_without_discovery_asks_and_keeps_nothing(mesh: Mesh) -> None:
    replica = await mesh.replica(server("flights"))
    await a_round(mesh, 2)
    directory = directory_of(replica)
    assert directory._known == {}
    await directory.wait_ready()
    topics = mesh.exchange.queues[Address(f"flights.private.{replica.id}")].topics
    assert topics == {"flights.describe", "*.describe"}


async def test_an_agent_of_an_earlier_release_gets_no_questions(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    """It subscribes to nothing, so that no message of an unknown type reaches it."""
    earlier = await mesh.fake_peer("flights")
    await mesh.replica(planner("flights", "*"))
    await a_round(mesh, 3)
    assert earlier.requests == earlier.messages == []
    assert caplog.text.count("the peer flights has sent no card") == 1
    assert await mesh.ask("planner", 1) == Ok([[]])


async def test_a_replica_without_its_private_queue_serves_and_introduces_itself_later(
    mesh: Mesh,
) -> None:
    planning = await mesh.replica(planner("*"))
    flights = await mesh.launch(server("flights"))
    flights.broker.locked_addresses.add("private")
    await mesh.events.wait(Step.STARTED, replica=flights.id)
    await mesh.idle()
    assert offered(planning, "*") == []
    flights.broker.locked_addresses.clear()
    await mesh.advance(10)
    assert offered(planning, "*") == ["flights/1"]


async def test_a_task_in_a_process_of_its_own_is_offered_peers(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_directory, "_COLLECT_SECONDS", 60.0)  # ends with the answer
    gate = Gate()

    @agent("agent")
    async def suspect(ctx: Context, number: int) -> list[str]:
        await gate()
        return [card.name for card in await offer_peers(ctx, ["flights"])]

    await mesh.replica(server("flights"))
    isolation = IsolatedRuns(mesh, suspect)
    (task,) = await make_suspects(mesh, client, suspect, gate, 1, isolation=isolation)
    await mesh.replica(suspect, isolation=isolation)
    await mesh.advance(LEASE)
    await isolation.wait_for_run()
    gate.opened.set()
    assert await client.reply(task) == Ok(["flights"])
    await mesh.idle()
    assert [each.is_done for each in isolation.all] == [True]


async def test_the_offer_of_a_recorded_subtask_is_no_base_of_later_ones(mesh: Mesh) -> None:
    """After the pause, the subtask does not run again, so its offers are unknown."""

    async def choose(ctx: Context) -> list[str]:
        return [card.name for card in await offer_peers(ctx, ["flights"])]

    @agent("planner")
    async def plan(ctx: Context, number: int) -> list[list[str]]:
        chosen = await ctx.subtask("choose", choose, ctx)
        again = await choose(ctx)
        await peer_of_card(AgentCard(name="flights"))(number)
        return [chosen, again, await choose(ctx)]

    described: Any = plan
    described.peer_patterns = ("flights",)
    await mesh.replica(server("flights"))
    await mesh.replica(plan)
    assert await mesh.ask("planner", 1) == Ok([["flights"]] * 3)
