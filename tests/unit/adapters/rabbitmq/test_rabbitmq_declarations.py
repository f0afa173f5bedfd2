"""What a RabbitMQ broker declares again after an outage, and what it leaves alone."""

from __future__ import annotations

import pytest

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import request_shard

AGENT = AgentName("flights")


class RecordedMarkers:
    """Stub of the markers at the broker. `may_set`: the login may set them."""

    def __init__(self, *, may_set: bool = True) -> None:
        self.agents: set[AgentName] = set()
        self.attempts = 0
        self._may_set = may_set

    async def exists(self, agent: AgentName) -> bool:
        return agent in self.agents

    async def set(self, agent: AgentName) -> bool:
        self.attempts += 1
        if self._may_set:
            self.agents.add(agent)
        return self._may_set

    async def remove(self, agent: AgentName) -> None:
        self.agents.discard(agent)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> RabbitMqBroker:
    """A broker without a server, whose declarations succeed."""

    async def declared(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(RabbitMqBroker, "_ensure_declared", declared)
    return RabbitMqBroker("amqp://nowhere/", namespace="demo")


async def test_a_later_declaration_drops_no_request_queue(broker: RabbitMqBroker) -> None:
    """Only the first declaration may name their number."""
    await broker.declare(AGENT, shards=3)
    await broker.declare(AGENT, ReplicaId("replica"))
    assert broker._declares(AGENT, None, request_shard(AGENT, 2))
    assert not broker._declares(AGENT, None, request_shard(AGENT, 3))


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_lost_marker_is_set_again_unless_it_was_removed(
    broker: RabbitMqBroker, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    markers = RecordedMarkers()
    monkeypatch.setattr(broker, "_markers", markers)
    assert await broker.mark_database(AGENT)
    assert not await broker.mark_database(AGENT)
    if is_removed:
        await broker.remove_database_marker(AGENT)
    markers.agents.clear()
    await broker._redeclare_all()
    assert markers.agents == (set() if is_removed else {AGENT})


async def test_a_marker_that_the_login_may_not_set_is_tried_once(
    broker: RabbitMqBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt logs a warning."""
    markers = RecordedMarkers(may_set=False)
    monkeypatch.setattr(broker, "_markers", markers)
    assert await broker.mark_database(AGENT)
    await broker._redeclare_all()
    assert markers.attempts == 1
