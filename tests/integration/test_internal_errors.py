"""A bug in Meshpoint's own code, on real servers, costs no replica, request or task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from live import Desk, Live, a_broker, serving

from meshpoint import FIRST, Call, Done, Paused, TaskExecutionContext
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.requests import Requests
from meshpoint.engine.segments import Segments
from meshpoint.engine.sweeper import Sweeper
from meshpoint.model.bodies import RequestBody, parse
from meshpoint.model.checkpoint import CancelNotice
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import MessageType, nested_of, requests_of, responses_of
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcomes

FRONT = AgentName("front")
EARLY = range(4)
"""Inputs of the tasks that wait for the peer when the bug occurs."""
SPARE = 100
gates: list[asyncio.Event] = []


class Front:
    """Calls its peer twice and takes the first answer.

    A negative number holds the slot until the gate opens.
    """

    name, state_format = FRONT, "front/1"

    async def start(self, ctx: TaskExecutionContext, number: int) -> Paused | Done[int]:
        if number >= 0:
            calls = [Call("one", "peer", number), Call("other", "peer", SPARE + number)]
            return Paused(calls, b"", FIRST)
        await gates[-1].wait()
        return Done(number)

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[Any]:
        return Done(next(each.value for each in outcomes.values() if isinstance(each, Ok)))


class Bug:
    """An internal method that raises for the next `left` calls."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str, bites: Callable[..., bool]) -> None:
        self.left = 0
        self.spent = asyncio.Event()
        original = getattr(owner, method)

        async def broken(*args: Any, **options: Any) -> Any:
            if self.left and bites(*args):
                self.left -= 1
                if not self.left:
                    self.spent.set()
                raise RuntimeError("a bug")
            return await original(*args, **options)

        patch.setattr(owner, method, broken)


@dataclass
class Scene:
    """One replica with one slot, its requester, its peer, and tasks that wait for the peer."""

    live: Live
    desk: Desk
    peer: Desk
    early: list[TaskId]
    arm: Callable[[], None]

    async def answer(self, number: int) -> None:
        """Answer the call with this input."""
        await self.peer.until(lambda: self._call(number) is not None)
        call = self._call(number)
        assert call is not None
        await self.peer.answer(call, 10 * number)

    def _call(self, number: int) -> Any:
        calls = [each for each in self.peer.letters if each.type is MessageType.REQUEST]
        found = [each for each in calls if parse(RequestBody, each.body).message.parts[0].data == number]
        return found[0] if found else None

    def called(self, number: int) -> str:
        """Id of the peer's task for this input."""
        found: str = self._call(number).correlation_id
        return found


async def _a_request_takes_a_slot(scene: Scene) -> None:
    gates.append(asyncio.Event())
    gates[-1].set()
    scene.arm()
    for number in (-1, -2):
        assert await scene.desk.reply(await scene.desk.ask(FRONT, number)) == Ok(number)


async def _tasks_become_ready(scene: Scene) -> None:
    """Two tasks become ready while another one holds the only slot, which then becomes free."""
    gates.append(asyncio.Event())
    holding = await scene.desk.ask(FRONT, -1)
    await scene.live.events.wait(Step.SEGMENT, Phase.BEFORE, task_id=holding)
    scene.arm()
    for number in (0, 1):
        await scene.answer(number)
        await scene.live.events.wait(Step.CLAIM, Phase.AFTER, task_id=scene.early[number])
    gates[-1].set()
    assert await scene.desk.reply(holding) == Ok(-1)
    for number in (0, 1):
        assert await scene.desk.reply(scene.early[number]) == Ok(10 * number)


async def _requests_come_again(scene: Scene) -> None:
    scene.arm()
    for number in (0, 1):
        await scene.desk.ask(FRONT, number, task_id=scene.early[number])
    for number in (0, 1):
        await scene.live.events.wait(Step.ACK, Phase.AFTER, 2, scene.early[number])


async def _requests_come_too_late(scene: Scene) -> None:
    scene.arm()
    for task_id in [await scene.desk.ask(FRONT, 1, deadline=1) for _ in range(2)]:
        reply = await scene.desk.reply(task_id)
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.TIMEOUT


async def _calls_are_cancelled(scene: Scene) -> None:
    """The first answers to two tasks make their other calls obsolete."""
    scene.arm()
    for number in (0, 1):
        await scene.answer(number)
        assert await scene.desk.reply(scene.early[number]) == Ok(10 * number)
    needless = {scene.called(SPARE + number) for number in (0, 1)}
    await scene.peer.until(lambda: needless <= set(scene.peer.cancels))


def _always(*_: Any) -> bool:
    return True


def _sends_a_cancel(*args: Any) -> bool:
    return any(isinstance(each, CancelNotice) for each in args[-1])


@pytest.fixture
async def desks(amqp_url: str, namespace: str) -> AsyncIterator[tuple[Desk, Desk]]:
    async with a_broker(amqp_url, namespace) as broker:
        yield await Desk(broker, "desk").open(), await Desk(broker, "peer").open()


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("owner", "method", "bites", "happens"),
    [
        pytest.param(Sweeper, "take_ready", _always, _tasks_become_ready, id="ready tasks"),
        pytest.param(Sweeper, "take_ready", _always, _a_request_takes_a_slot, id="a slot for a request"),
        pytest.param(Outgoing, "wake_others", _always, _tasks_become_ready, id="news of ready tasks"),
        pytest.param(Requests, "_again", _always, _requests_come_again, id="requests that come again"),
        pytest.param(Requests, "_settled", _always, _requests_come_again, id="requests to settle"),
        pytest.param(Requests, "_refuse", _always, _requests_come_too_late, id="requests to refuse"),
        pytest.param(Segments, "send", _sends_a_cancel, _calls_are_cancelled, id="cancels to send"),
    ],
)
async def test_the_replica_lives_and_answers_everybody(
    desks: tuple[Desk, Desk],
    amqp_url: str,
    namespace: str,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    bites: Callable[..., bool],
    happens: Callable[[Scene], Awaitable[None]],
    times: int,
) -> None:
    desk, played = desks
    bug = Bug(monkeypatch, owner, method, bites)
    async with serving(Front(), amqp_url, namespace, postgres_url, max_concurrency=1) as live:
        early = [await desk.ask(FRONT, number) for number in EARLY]
        scene = Scene(live, desk, played, early, partial(setattr, bug, "left", times))
        for task_id in early:  # they wait for the peer, and their requests are acked
            await live.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
        await _while_it_lives(live, happens(scene))
        await _while_it_lives(live, bug.spent.wait())

        for number, task_id in enumerate(early):
            await scene.answer(number)
            assert await _while_it_lives(live, desk.reply(task_id)) == Ok(10 * number)
        late = await desk.ask(FRONT, 7)
        await _while_it_lives(live, scene.answer(7))
        assert await _while_it_lives(live, desk.reply(late)) == Ok(70)
        for task_id in [*early, late]:
            assert len({repr(each) for each in desk.replies(task_id)}) == 1
    for address in (requests_of(FRONT), nested_of(FRONT), responses_of(FRONT)):
        assert await desk.depth(address) == 0, "unsettled messages are left"


async def _while_it_lives(live: Live, step: Any) -> Any:
    """Wait for `step`; if the replica ends meanwhile, raise its error."""
    doing = asyncio.ensure_future(step)
    try:
        await asyncio.wait({doing, live.task}, return_when=asyncio.FIRST_COMPLETED)
        if live.task.done():
            await live.task
            pytest.fail("the replica ended")
        assert doing.done(), "the step timed out"
        return doing.result()
    finally:
        doing.cancel()
