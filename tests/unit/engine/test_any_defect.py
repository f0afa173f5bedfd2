"""A defect in any method of a port: the replica keeps serving and leaks nothing."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.adapters.inprocess.exchange import InProcessDelivery
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.task_store import CheckpointStore

from .agents import asker, doubler
from .mesh import Mesh, Running
from .puppet import Puppet


class Defect(Exception):
    """An exception that no code expects."""


def methods_of(port: Any) -> list[str]:
    """Names of the coroutine methods of a port. Methods added later are tested automatically."""
    named = {
        name for each in port.__mro__ for name, value in vars(each).items() if inspect.iscoroutinefunction(value)
    }
    return sorted(named - {"open", "close"})


STORE = [("store", name) for name in methods_of(CheckpointStore)]
MEMORY = [("memory", name) for name in methods_of(CheckpointStore)]
BROKER = [("broker", name) for name in methods_of(Broker) if name not in {"declare", "consume"}]
DELIVERY = [("delivery", name) for name in methods_of(Delivery)]
SUBSCRIPTION = [("subscription", "resize"), ("observer", "emit")]


class Sabotage:
    """Makes one method raise a limited number of times."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.left = 0.0
        self.raised = 0

    def begin(self, running: Running, mesh: Mesh, where: str, method: str, times: float) -> None:
        self.left = times
        match where:
            case "store" | "memory":
                getattr(running, where).before[method] = self._maybe
            case "broker":
                self._wrap(running.broker, method)
            case "subscription":
                for subscription in running.worker._subscriptions.values():
                    self._wrap(subscription, method)
            case "delivery":
                self._wrap(InProcessDelivery, method)
            case "observer":
                mesh.events.hooks.append(lambda _: self._raise())

    def _wrap(self, target: Any, method: str) -> None:
        original = getattr(target, method)

        async def sabotaged(*args: Any, **options: Any) -> Any:
            await self._maybe()
            return await original(*args, **options)

        self._patch.setattr(target, method, sabotaged)

    async def _maybe(self) -> None:
        self._raise()

    def _raise(self) -> None:
        if self.left > 0:
            self.left -= 1
            self.raised += 1
            raise Defect("sabotage")


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Sabotage:
    return Sabotage(monkeypatch)


@pytest.mark.parametrize("times", [1, float("inf")], ids=["once", "always"])
@pytest.mark.parametrize(
    ("where", "method"),
    [*STORE, *MEMORY, *BROKER, *DELIVERY, *SUBSCRIPTION],
    ids=str,
)
async def test_the_replica_serves_on(
    mesh: Mesh, boss: Puppet, peer: Puppet, sabotage: Sabotage, where: str, method: str, times: float
) -> None:
    durable = where != "memory"
    running = await mesh.replica(
        asker("asker", "peer", timeout=timedelta(seconds=40)), durable=durable, max_concurrency=3
    )
    await mesh.replica(doubler)
    early = [await boss.ask("asker", number) for number in range(5)]
    for count in range(5):
        await peer.request_number(count + 1)

    sabotage.begin(running, mesh, where, method, times)
    late = [await boss.ask("asker", number) for number in range(5, 10)]
    for asked in list(peer.requests):
        await peer.respond(asked, 1)
    await boss.cancel("asker", early[0])
    # without a lookup the task looks new, so the duplicate would get the defect as its answer
    if method != "lookup":
        await boss.ask("asker", 1, early[1])
    await mesh.advance(3)
    assert await boss.reply(await boss.ask("doubler", 4)) == Ok(8), "another agent is disturbed"

    sabotage.left = 0
    answered = 5
    for _ in range(90):
        await mesh.advance(1)
        for asked in peer.requests[answered:]:
            await peer.respond(asked, 1)
        answered = len(peer.requests)
    assert not running.task.done(), "the replica stopped"
    fresh = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(answered + 1), 2)
    assert await boss.reply(fresh) == Ok({"peer": 2})
    await mesh.settle()
    for task_id in [*early, *late]:
        if (where, method) == ("broker", "publish") and mesh.events.of(Step.MESSAGE_REJECTED, task_id=task_id):
            continue  # the replica considers this reply impossible to send
        outcomes = boss.replies(task_id)
        assert outcomes, "a request has no answer"
        assert len({str(outcome) for outcome in outcomes}) == 1, "replies of one task differ"
        assert isinstance(outcomes[0], (Ok, Failed))
    assert running.worker.site.slots.free == 3, "a slot leaked"
    assert running.worker.segments.live == {}
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0, "a request was kept"


async def test_a_defect_is_noted_once_a_minute(mesh: Mesh, boss: Puppet, caplog: pytest.LogCaptureFixture) -> None:
    running = await mesh.replica(doubler)

    async def fails() -> None:
        raise Defect("again and again")

    running.store.before["due"] = fails
    running.worker._spawn(fails())
    running.worker._spawn(fails())
    await mesh.settle()
    (noted,) = mesh.events.of(Step.DEFECT)
    assert noted.detail["error"] == "Defect: again and again"
    assert sum("again and again" in record.message for record in caplog.records if record.exc_info) == 1
    await asyncio.sleep(0)
