"""A handle asks the agent for the outcome of a task that its connection has not requested."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

from idle_loop import idle
from meshpoint import (
    InvalidOption,
    MeshClosed,
    OtherRequester,
    OutcomeUnknown,
    Peer,
    TaskHandle,
    TaskNotFound,
    UnknownAgent,
)
from meshpoint.client import attachment, transport
from meshpoint.model.bodies import AttachBody, parse_body
from meshpoint.model.envelopes import attach_status
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import AttachStatus, Header, Message, MessageType

from .calling import ROME, Call, Plan, travel


def attaches(call: Call) -> list[Message]:
    return [each for each in call.agent.messages if each.type is MessageType.ATTACH]


async def wait_for_attaches(call: Call, count: int = 1) -> Message:
    await call.agent.wait_until(lambda: len(attaches(call)) >= count)
    return attaches(call)[count - 1]


async def send_status(
    call: Call,
    attach: Message,
    status: AttachStatus | str,
    requester: str | None = None,
    *,
    certain: bool = False,
) -> None:
    assert attach.reply_to is not None
    task_id = TaskId(attach.correlation_id)
    envelope = attach_status(
        AgentName("travel"),
        task_id,
        attach.reply_to,
        AttachStatus.UNKNOWN,
        requester,
        certain=certain,
    )
    assert envelope is not None
    message = envelope[1]
    message.headers[Header.ATTACH.value] = str(status)
    await call.agent.send_to_address(attach.reply_to, message)


def wait(handle: TaskHandle[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(handle.result())


async def test_nothing_is_sent_before_the_handle_is_used(call: Call) -> None:
    handle = call.mesh.task(travel, "order-17")
    await idle()
    assert attaches(call) == []
    assert (handle.agent, handle.id) == ("travel", "order-17")


async def test_the_result_is_typed(call: Call) -> None:
    waiting = wait(call.mesh.task(travel, "order-17"))
    attach = await wait_for_attaches(call)
    assert parse_body(AttachBody, attach.body).id == "order-17"
    assert (attach.app_id, attach.reply_to) == ("api", call.transport.reply_to)
    await call.agent.respond(attach, {"text": "by train"})
    assert await waiting == Plan(text="by train")


async def test_all_waits_of_a_connection_share_one_attach(call: Call) -> None:
    waits = [wait(call.mesh.task(travel, "order-17")) for _ in range(3)]
    waits.append(wait(call.mesh.task("travel", "order-17")))
    attach = await wait_for_attaches(call)
    await send_status(call, attach, AttachStatus.RECORDED)
    await idle()
    assert len(attaches(call)) == 1
    await call.agent.respond(attach, {"text": "by train"})
    results = await asyncio.gather(*waits)
    assert results == [*3 * [Plan(text="by train")], {"text": "by train"}]


async def test_a_task_that_was_sent_here_needs_no_attach(call: Call) -> None:
    await_sent = wait(await call.mesh.send(travel, ROME, task_id="order-17"))
    waiting = wait(call.mesh.task(travel, "order-17"))
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await waiting == await await_sent == Plan(text="by train")
    assert attaches(call) == []


async def test_a_wait_that_was_given_up_leaves_nothing_behind(call: Call) -> None:
    handle = call.mesh.task(travel, "order-17")
    waiting = wait(handle)
    await wait_for_attaches(call)
    waiting.cancel()
    await asyncio.wait({waiting})
    del handle, waiting
    gc.collect()
    assert (call.open_tasks, call.transport._awaited) == ([], set())


async def test_an_unknown_status_may_be_overruled(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    monkeypatch.setattr(attachment, "_MIN_UNKNOWN_REPLIES", 2)
    waiting = wait(call.mesh.task(travel, "order-17"))
    for count in (1, 2, 3):
        attach = await wait_for_attaches(call, count)
        if count < 3:
            await send_status(call, attach, AttachStatus.RUNNING)
        await send_status(call, attach, AttachStatus.UNKNOWN, certain=True)
        if count < 3:
            await idle()
            call.transport._open["travel", "order-17"].ask_again()
    await send_status(call, await wait_for_attaches(call, 4), AttachStatus.UNKNOWN, certain=True)
    with pytest.raises(TaskNotFound):
        await waiting
    assert len(attaches(call)) == 4


async def test_a_task_is_not_found_only_if_that_is_certain(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of the previous release are never certain."""
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    waiting = wait(call.mesh.task(travel, "order-17"))
    for count in range(1, 31):
        await send_status(call, await wait_for_attaches(call, count), AttachStatus.UNKNOWN)
    await idle()
    assert not waiting.done()
    attach = await wait_for_attaches(call, 31)
    await send_status(call, attach, AttachStatus.UNKNOWN, certain=True)
    with pytest.raises(TaskNotFound):
        await waiting


async def test_a_certain_reply_to_an_attach_from_before_the_request_does_not_count(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    waiting = wait(call.mesh.task(travel, "order-17"))
    for count in range(1, 5):
        await send_status(call, await wait_for_attaches(call, count), AttachStatus.UNKNOWN)
    attach = await wait_for_attaches(call, 5)
    sent = await call.mesh.send(travel, ROME, task_id="order-17")
    await send_status(call, attach, AttachStatus.UNKNOWN, certain=True)
    await idle()
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await waiting == await sent.result() == Plan(text="by train")


async def test_two_replies_to_one_attach_count_once(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0, 60.0))
    waiting = wait(call.mesh.task(travel, "order-17"))
    await send_status(call, await wait_for_attaches(call), AttachStatus.UNKNOWN)
    attach = await wait_for_attaches(call, 2)
    for _ in range(5):
        await send_status(call, attach, AttachStatus.UNKNOWN)
    await idle()
    assert not waiting.done()
    await call.agent.respond(attach, {"text": "by train"})
    assert await waiting == Plan(text="by train")


async def test_a_status_of_a_later_release_is_ignored(call: Call) -> None:
    waiting = wait(call.mesh.task(travel, "order-17"))
    attach = await wait_for_attaches(call)
    await send_status(call, attach, "elsewhere")
    await idle()
    assert not waiting.done()
    await send_status(call, attach, AttachStatus.REFUSED, "shop")
    with pytest.raises(OtherRequester, match="belongs to 'shop', this client is 'api'"):
        await waiting


async def test_an_error_names_a_long_requester_only_in_part(call: Call) -> None:
    waiting = wait(call.mesh.task(travel, "order-17"))
    attach = await wait_for_attaches(call)
    await send_status(call, attach, AttachStatus.REFUSED, 10_000 * "x")
    with pytest.raises(OtherRequester) as caught:
        await waiting
    assert len(str(caught.value)) < 5_000


async def test_an_attach_that_the_broker_did_not_take_is_repeated(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_OUTAGE_DELAY", 0.0)
    call.broker.failures.extend(["not stored", "confirm lost"])
    waiting = wait(call.mesh.task(travel, "order-17"))
    attach = await wait_for_attaches(call, 2)
    await call.agent.respond(attach, {"text": "by train"})
    assert await waiting == Plan(text="by train")


async def test_after_an_outage_open_tasks_are_asked_about(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    waiting = wait(await call.mesh.send(travel, ROME))
    states = iter([True, False, False, True])
    monkeypatch.setattr(transport, "_CONNECTION_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(call.broker, "is_consuming", lambda _: next(states, True))
    watcher = asyncio.create_task(call.transport._watch_connection())
    for count in (1, 2):
        await send_status(call, await wait_for_attaches(call, count), AttachStatus.UNKNOWN)
    watcher.cancel()
    await idle()
    assert not waiting.done()  # its request may be anywhere
    assert len(attaches(call)) == 3
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await waiting == Plan(text="by train")


async def test_a_call_whose_task_exists_nowhere_after_an_outage_ends_with_an_error(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    calling = asyncio.ensure_future(call.mesh.call(travel, ROME, task_id="order-17"))
    await call.agent.wait_for_request()
    call.transport.ask_again()
    for count in range(1, 6):
        attach = await wait_for_attaches(call, count)
        await send_status(call, attach, AttachStatus.UNKNOWN, certain=True)
    with pytest.raises(OutcomeUnknown, match="outcome of task 'order-17' of 'travel' is unknown"):
        await calling


async def test_after_an_outage_the_open_tasks_are_not_all_asked_about_at_once(call: Call) -> None:
    handles = [call.mesh.task(travel, f"order-{number}") for number in range(3)]
    call.transport.ask_again()
    due = [handle._task.attachment.due_at for handle in handles]
    assert max(due) - min(due) >= 2 / 200


async def test_an_attached_wait_ends_with_the_connection(call: Call) -> None:
    waiting = wait(call.mesh.task(travel, "order-17"))
    await wait_for_attaches(call)
    await call.mesh.aclose()
    with pytest.raises(MeshClosed):
        await waiting
    with pytest.raises(MeshClosed):
        call.mesh.task(travel, "order-17")


async def test_a_status_query_ends_with_the_connection(call: Call) -> None:
    asking = asyncio.ensure_future(call.mesh.task(travel, "order-17").status())
    await wait_for_attaches(call)
    await call.mesh.aclose()
    await idle()
    assert asking.done()
    with pytest.raises(MeshClosed):
        await asking


@pytest.mark.parametrize("task_id", ["", "a\nb", "a" * 249])
async def test_an_invalid_id_is_refused(call: Call, task_id: str) -> None:
    with pytest.raises(InvalidOption, match="task_id"):
        call.mesh.task(travel, task_id)


async def test_the_output_is_known_to_the_type_checker(call: Call) -> None:
    handle: TaskHandle[Plan] = call.mesh.task(Peer("travel", str, Plan), "order-17")
    assert handle.id == "order-17"


class Asks:
    """An attachment, and the error of its next attach."""

    def __init__(self, *, is_requested: bool = False) -> None:
        self.error: BaseException | None = None
        self.attachment = attachment.Attachment("travel", "order-17")
        self.queries = 0
        self.attachment.ask_by(self._attach, self._query)
        if is_requested:
            self.attachment.expect_reply(100.0)
        else:
            self.attachment.start()

    async def _query(self) -> None:
        self.queries += 1

    async def _attach(self, wants_snapshot: bool) -> None:
        if self.error is not None:
            raise self.error

    async def delay(self, *replies: AttachStatus, certain: bool = False) -> float:
        """Attach, receive replies, and return the delay until the next attach."""
        now = 100.0
        await self.attachment.ask(now)
        for status in replies:
            self.attachment.record_status(status, now, certain=certain)
        return self.attachment.due_at - now


UNKNOWN, QUEUED = AttachStatus.UNKNOWN, AttachStatus.QUEUED
RUNNING, RECORDED = AttachStatus.RUNNING, AttachStatus.RECORDED


@pytest.mark.parametrize("status", [UNKNOWN, QUEUED])
async def test_a_second_reply_to_one_attach_does_not_postpone_the_next(
    status: AttachStatus,
) -> None:
    one, two = Asks(), Asks()
    assert await two.delay(status, status) == await one.delay(status)
    assert await two.delay(status) == await one.delay(status)


@pytest.mark.parametrize("known", [QUEUED, RUNNING, RECORDED])
async def test_a_known_task_resets_the_delays_of_unknown_replies(known: AttachStatus) -> None:
    asks = Asks()
    delays = [await asks.delay(UNKNOWN) for _ in range(8)]
    await asks.delay(known)
    assert [await asks.delay(UNKNOWN) for _ in range(8)] == delays
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


async def test_a_running_task_resets_the_delays_of_queued_replies() -> None:
    asks = Asks()
    delays = [await asks.delay(QUEUED) for _ in range(3)]
    await asks.delay(RUNNING)
    assert [await asks.delay(QUEUED) for _ in range(3)] == delays == [0.5, 1.0, 2.0]


async def test_attaches_without_a_reply_become_rare_until_a_reply() -> None:
    asks = Asks()
    assert [await asks.delay() for _ in range(6)] == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert await asks.delay(RUNNING) == 10.0
    assert await asks.delay() == 60.0


@pytest.mark.parametrize("replies", [(), (UNKNOWN,), (QUEUED,)])
async def test_after_an_outage_the_delays_begin_anew(replies: Sequence[AttachStatus]) -> None:
    asks = Asks()
    delays = [await asks.delay(*replies) for _ in range(3)]
    asks.attachment.start()
    assert [await asks.delay(*replies) for _ in range(3)] == delays


async def test_a_late_notice_of_the_end_does_not_repeat_an_attach() -> None:
    asks = Asks()
    delay = await asks.delay(RUNNING)
    asks.attachment.record_end()
    assert asks.attachment.due_at == 100.0 + delay


async def test_a_request_does_not_postpone_an_attach_that_is_due() -> None:
    asks = Asks()
    asks.attachment.expect_reply(100.0)
    assert asks.attachment.due_at == 0.0


@pytest.mark.parametrize("replies", [(), (QUEUED,), (RUNNING,), (RECORDED,), (UNKNOWN, RUNNING)])
async def test_a_requested_task_is_asked_about_rarely(replies: Sequence[AttachStatus]) -> None:
    asks = Asks(is_requested=True)
    delays = [asks.attachment.due_at - 100.0] + [await asks.delay(*replies) for _ in range(20)]
    assert 600.0 <= min(delays) < max(delays) <= 1200.0


@pytest.mark.parametrize("replies", [(QUEUED,), (RUNNING,), (RECORDED,), (UNKNOWN, RUNNING)])
async def test_a_displaced_connection_takes_no_place(replies: Sequence[AttachStatus]) -> None:
    asks = Asks()
    asks.attachment.displace(100.0)
    delays = [asks.attachment.due_at - 100.0] + [await asks.delay(*replies) for _ in range(20)]
    assert 60.0 <= min(delays) < max(delays) <= 120.0
    assert asks.queries == 20
    due_at = asks.attachment.due_at
    asks.attachment.displace(190.0)
    assert asks.attachment.due_at == due_at, "a repeated notice postponed the query"
    asks.attachment.record_end()
    assert asks.attachment.due_at == 0.0
    await asks.delay()
    assert asks.queries == 20


@pytest.mark.parametrize("status", [UNKNOWN, QUEUED, RUNNING, RECORDED])
@pytest.mark.parametrize("is_displaced", [True, False])
async def test_a_late_reply_does_not_postpone_an_attach_that_is_due(
    status: AttachStatus, is_displaced: bool
) -> None:
    asks = Asks(is_requested=True)
    if is_displaced:
        asks.attachment.displace(100.0)
    await asks.delay()
    if is_displaced:
        asks.attachment.take_place()  # for a new stream
    else:
        asks.attachment.start()  # after an outage
    asks.attachment.record_status(status, 100.0)
    assert asks.attachment.due_at == 0.0


async def test_a_displaced_connection_learns_that_its_task_is_gone() -> None:
    asks = Asks()
    asks.attachment.displace(100.0)
    for _ in range(5):
        asks.attachment.raise_error()
        await asks.delay(UNKNOWN, certain=True)
    with pytest.raises(TaskNotFound):
        asks.attachment.raise_error()


@pytest.mark.parametrize("is_requested", [True, False])
async def test_a_cancelled_attach_is_repeated_by_the_next_wait(is_requested: bool) -> None:
    asks = Asks(is_requested=is_requested)
    asks.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await asks.delay()
    assert asks.attachment.due_at == 100.0


async def test_lost_queues_of_an_agent_fail_only_tasks_that_were_not_requested() -> None:
    requested, attached = Asks(is_requested=True), Asks()
    requested.error = attached.error = UnknownAgent(AgentName("travel"))
    assert await requested.delay() == 1.0
    with pytest.raises(UnknownAgent):
        await attached.delay()
    assert attached.attachment.due_at == 100.0
