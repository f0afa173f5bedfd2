"""A defect in any method of a port: the replica keeps serving and leaks nothing."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.broker import InProcessDelivery
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.task_store import CheckpointStore

from .agents import asker, doubler
from .mesh import Mesh, RunningReplica


class Defect(Exception):
    """An exception that no code expects."""


def coroutine_methods(port: Any) -> list[str]:
    """Names of the coroutine methods of a port. Methods added later are tested automatically."""
    names = {
        name
        for base in port.__mro__
        for name, value in vars(base).items()
        if inspect.iscoroutinefunction(value)
    }
    return sorted(names - {"open", "close"})


STORE = [("store", name) for name in coroutine_methods(CheckpointStore)]
MEMORY = [("memory", name) for name in coroutine_methods(CheckpointStore)]
BROKER = [
    ("broker", name) for name in coroutine_methods(Broker) if name not in {"declare", "consume"}
]
DELIVERY = [("delivery", name) for name in coroutine_methods(Delivery)]
SUBSCRIPTION = [("subscription", "resize"), ("observer", "emit")]


class Sabotage:
    """Makes one method raise a limited number of times."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.remaining = 0.0
        self.raised = 0

    def begin(
        self, replica: RunningReplica, mesh: Mesh, target_name: str, method: str, times: float
    ) -> None:
        self.remaining = times
        match target_name:
            case "store" | "memory":
                getattr(replica, target_name).before[method] = self._raise_if_remaining
            case "broker":
                self._wrap(replica.broker, method)
            case "subscription":
                for subscription in replica.worker._subscriptions.values():
                    self._wrap(subscription, method)
            case "delivery":
                self._wrap(InProcessDelivery, method)
            case "observer":
                mesh.events.hooks.append(lambda _: self._raise())

    def _wrap(self, target: Any, method: str) -> None:
        original = getattr(target, method)

        async def failing(*args: Any, **options: Any) -> Any:
            await self._raise_if_remaining()
            return await original(*args, **options)

        self._patch.setattr(target, method, failing)

    async def _raise_if_remaining(self) -> None:
        self._raise()

    def _raise(self) -> None:
        if self.remaining > 0:
            self.remaining -= 1
            self.raised += 1
            raise Defect("sabotage")


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Sabotage:
    return Sabotage(monkeypatch)


@pytest.mark.parametrize("times", [1, float("inf")], ids=["once", "always"])
@pytest.mark.parametrize(
    ("port", "method"),
    [*STORE, *MEMORY, *BROKER, *DELIVERY, *SUBSCRIPTION],
    ids=str,
)
async def test_a_replica_keeps_serving_after_a_defect_in_any_port_method(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    sabotage: Sabotage,
    port: str,
    method: str,
    times: float,
) -> None:
    durable = port != "memory"
    replica = await mesh.replica(
        asker("asker", "peer", timeout=timedelta(seconds=40)), durable=durable, max_concurrency=3
    )
    await mesh.replica(doubler)
    early_id = [await client.ask("asker", number) for number in range(5)]
    for count in range(5):
        await peer.wait_for_request(count + 1)

    sabotage.begin(replica, mesh, port, method, times)
    late_ids = [await client.ask("asker", number) for number in range(5, 10)]
    for request in list(peer.requests):
        await peer.respond(request, 1)
    await client.cancel("asker", early_id[0])
    # without a lookup the task looks new, so the duplicate would get the defect as its answer
    if method != "lookup":
        await client.ask("asker", 1, early_id[1])
    await mesh.advance(3)
    assert await client.reply(await client.ask("doubler", 4)) == Ok(8), (
        "another agent is disturbed"
    )

    sabotage.remaining = 0
    answered = 5
    for _ in range(30):
        await mesh.advance(3, step=3)
        for request in peer.requests[answered:]:
            await peer.respond(request, 1)
        answered = len(peer.requests)
    assert not replica.task.done(), "the replica stopped"
    fresh = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(answered + 1), 2)
    assert await client.reply(fresh) == Ok({"peer": 2})
    await mesh.idle()
    for task_id in [*early_id, *late_ids]:
        if (port, method) == ("broker", "publish") and mesh.events.matching(
            Step.MESSAGE_REJECTED, task_id=task_id
        ):
            continue  # the replica considers this reply impossible to send
        outcomes = client.replies(task_id)
        assert outcomes, "a request has no answer"
        assert len({str(outcome) for outcome in outcomes}) == 1, "replies of one task differ"
        assert isinstance(outcomes[0], (Ok, Failed))
    assert replica.worker.runtime.slots.free == 3, "a slot leaked"
    assert replica.worker.tasks.segments == {}
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0, "a request was kept"


async def test_a_repeated_defect_is_reported_once_a_minute(
    mesh: Mesh, client: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await mesh.replica(doubler)

    async def fails() -> None:
        raise Defect("again and again")

    replica.store.before["due"] = fails
    replica.worker._spawn(fails)
    replica.worker._spawn(fails)
    await mesh.idle()
    (event,) = mesh.events.matching(Step.DEFECT)
    assert event.detail["error"] == "Defect: again and again"
    assert (
        sum("again and again" in record.message for record in caplog.records if record.exc_info)
        == 1
    )
