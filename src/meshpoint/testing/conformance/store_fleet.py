"""The replicas that serve agents."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from meshpoint.model.ids import ReplicaId
from meshpoint.model.replicas import (
    KEPT_WHEN_LOST,
    RegisteredReplica,
    Registration,
    ReplicaState,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import AGENT, ELSEWHERE, FORMAT, HERE, SECOND, THERE, one

_VALID_FOR = timedelta(seconds=30)


def a_registration(replica: ReplicaId = HERE.id) -> Registration:
    """What a replica says about itself."""
    return Registration(
        replica, AGENT, "1.0", "2.0", frozenset({FORMAT}), 10, "host", valid_for=_VALID_FOR, pid=7
    )


async def states(store: CheckpointStore) -> dict[ReplicaId, ReplicaState]:
    """The state of each replica of `AGENT`."""
    return {each.id: each.state for each in await store.replicas(AGENT)}


class FleetSuite:
    """A replica is registered until it stops, or until it was lost for long."""

    async def test_a_registered_replica_is_listed(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        assert await other.replicas() == []
        started_at = clock.now()
        await store.register(a_registration())
        clock.advance(10 * SECOND)
        await store.register(a_registration())
        found = RegisteredReplica(
            HERE.id,
            AGENT,
            ReplicaState.LIVE,
            "1.0",
            "2.0",
            frozenset({FORMAT}),
            10,
            "host",
            started_at,
            clock.now(),
            7,
        )
        assert await other.replicas() == [found]
        assert await other.replicas(AGENT) == [found]
        assert await other.replicas(ELSEWHERE) == []

    async def test_a_process_is_optional_and_no_part_of_the_host(
        self, store: CheckpointStore
    ) -> None:
        for host, pid in (("fe80::1", None), ("fe80::1", 12), ("a pid b", 3)):
            await store.register(replace(a_registration(), host=host, pid=pid))
            found = one(await store.replicas())
            assert (found.host, found.pid) == (host, pid)
            await store.unregister(AGENT, HERE.id)

    async def test_a_draining_replica_is_shown(self, store: CheckpointStore) -> None:
        await store.register(a_registration())
        await store.register(replace(a_registration(), is_draining=True))
        assert one(await store.replicas()).state is ReplicaState.DRAINING

    async def test_a_stopped_replica_is_forgotten(self, store: CheckpointStore) -> None:
        for each in (HERE.id, THERE.id):
            await store.register(a_registration(each))
        await store.unregister(ELSEWHERE, HERE.id)
        await store.unregister(AGENT, HERE.id)
        await store.unregister(AGENT, HERE.id)
        assert await states(store) == {THERE.id: ReplicaState.LIVE}

    async def test_a_silent_replica_is_lost_until_it_registers_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await store.register(replace(a_registration(), is_draining=True))
        clock.advance(_VALID_FOR - SECOND)
        assert await states(store) == {HERE.id: ReplicaState.DRAINING}
        clock.advance(SECOND)
        assert await states(store) == {HERE.id: ReplicaState.LOST}
        await store.register(a_registration())
        assert await states(store) == {HERE.id: ReplicaState.LIVE}

    async def test_a_replica_lost_long_ago_is_forgotten(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await store.register(a_registration())
        await store.register(replace(a_registration(), agent=ELSEWHERE))
        clock.advance(_VALID_FOR + KEPT_WHEN_LOST - SECOND)
        await store.register(a_registration(THERE.id))
        assert await states(store) == {HERE.id: ReplicaState.LOST, THERE.id: ReplicaState.LIVE}
        clock.advance(SECOND)
        await store.register(a_registration(THERE.id))
        assert await states(store) == {THERE.id: ReplicaState.LIVE}
        assert one(await store.replicas(ELSEWHERE)).state is ReplicaState.LOST
