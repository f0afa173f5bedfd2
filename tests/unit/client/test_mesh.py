"""Sending requests, and the outcomes of their tasks."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from idle_loop import idle
from meshpoint import (
    Done,
    Failed,
    FailureKind,
    InvalidInput,
    InvalidOption,
    MeshClosed,
    NotJson,
    Ok,
    Paused,
    Peer,
    QueueFull,
    SendInDoubt,
    StatefulAgent,
    TaskCancelled,
    TaskExecutionContext,
    TaskFailed,
    TaskTimeout,
    UnknownAgent,
    agent,
)
from meshpoint.client import open_task
from meshpoint.model.bodies import CancelBody, RequestBody, parse_body
from meshpoint.model.envelopes import encode_reply, fingerprint
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header, Message
from meshpoint.ports.broker import PublishResult

from .calling import OSLO, ROME, Call, Plan, Trip, travel

Answer = Ok[Any] | Failed


def body_of(request: Message) -> RequestBody:
    return parse_body(RequestBody, request.body)


async def refuse(call: Call, request: Message, refused: Message | None = None) -> None:
    """Refuse `request` as an agent does, or another request for the same task."""
    body = encode_reply(
        TaskId(request.correlation_id),
        None,
        Failed(FailureKind.INVALID, "the task id is in use by another request"),
        refused_fingerprint=fingerprint(refused or request),
    )
    await call.agent.respond(request, None, body=body)


async def test_input_and_output_are_typed(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    assert body_of(request).input() == {"city": "Rome", "days": 1}
    await call.agent.respond(request, {"text": "by train"})
    assert await task.result() == Plan(text="by train")
    assert (task.agent, task.id) == ("travel", request.correlation_id)


async def test_options_reach_the_agent(call: Call) -> None:
    await call.mesh.send(
        travel,
        ROME,
        task_id="order-17",
        timeout=timedelta(hours=1),
        user_id="ada",
        session_id="s-1",
        context_id="c-1",
        metadata={"team": "blue"},
    )
    request = await call.agent.wait_for_request()
    body = body_of(request)
    assert body.metadata == {"userId": "ada", "sessionId": "s-1", "team": "blue"}
    assert (body.message.task_id, body.message.context_id) == ("order-17", "c-1")
    assert request.timestamp is not None
    deadline = request.headers[Header.DEADLINE.value]
    assert deadline == request.timestamp.timestamp() + 3600


async def test_a_peer_brings_its_timeout(call: Call) -> None:
    quick = Peer("travel", Trip, Plan, timeout=timedelta(minutes=1))
    await call.mesh.send(quick, ROME)
    await call.mesh.send(quick, ROME, timeout=60 * 60)
    for number, seconds in ((1, 60), (2, 3600)):
        request = await call.agent.wait_for_request(number)
        assert request.timestamp is not None
        deadline = request.headers[Header.DEADLINE.value]
        assert deadline == request.timestamp.timestamp() + seconds


@agent("travel")
async def travel_agent(ctx: TaskExecutionContext, trip: Trip) -> Plan:
    raise AssertionError("the test plays the agent")


class TravelAgent(StatefulAgent[Trip, Trip, Plan]):
    name = "travel"

    async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Paused | Done[Plan]:
        raise AssertionError("the test plays the agent")


@pytest.mark.parametrize(
    "target",
    [travel_agent, TravelAgent(), Peer.of(travel_agent)],
    ids=["function", "class", "peer"],
)
async def test_agents_and_their_peers_are_typed_alike(call: Call, target: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^input for 'travel': Trip: city: "):
        await call.mesh.send(target, {"days": 1})
    task = await call.mesh.send(target, ROME)
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await task.result() == Plan(text="by train")


async def test_a_name_takes_and_returns_json(call: Call) -> None:
    answering = asyncio.create_task(call.mesh.call("travel", {"trips": [ROME]}))
    request = await call.agent.wait_for_request()
    assert body_of(request).input() == {"trips": [{"city": "Rome", "days": 1}]}
    await call.agent.respond(request, {"text": 1})
    assert await answering == {"text": 1}


@pytest.mark.parametrize(
    ("target", "request_", "error", "message"),
    [
        (travel, {"city": 1}, InvalidInput, "input for 'travel': Trip: city: Input should be"),
        ("travel", float("nan"), InvalidInput, "input for 'travel': JSON: "),
        (travel(ROME), ROME, TypeError, "a call of 'travel' is for agents; write mesh.call"),
        (Trip, ROME, TypeError, "is not an agent: pass a Peer, an agent or the name of one"),
    ],
    ids=["input", "nan", "call", "class"],
)
async def test_a_request_that_cannot_be_sent_is_refused_in_one_line(
    call: Call, target: Any, request_: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        await call.mesh.send(target, request_)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    await idle()
    assert call.agent.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 86_400_000}, "timeout: 86400000 s is 2.7 years; durations are in seconds: "),
        ({"timeout": 0}, "timeout is 0; it must be positive"),
        ({"timeout": timedelta(days=4000)}, "it must be positive and at most ten years"),
        ({"timeout": "1h"}, "timeout must be a timedelta or a number of seconds, not str"),
        ({"task_id": ""}, "task_id: must not be empty"),
        ({"task_id": "x" * 249}, "task_id: must be printable and at most 248 bytes long"),
        ({"task_id": "a~resume-1"}, "task_id: 'a~resume-1' ends as only ids of resumed calls"),
        ({"task_id": 17}, "task_id: must be a string, not int"),
        ({"user_id": "a\0"}, "user_id: must be printable"),
        ({"session_id": "\udcff"}, "session_id: must be printable"),
        ({"context_id": "x" * 1001}, "context_id: must be printable and at most 1000 bytes"),
        ({"metadata": {"userId": "eve"}}, "metadata: the key 'userId' is reserved"),
        ({"metadata": ["a"]}, "metadata: must be a mapping, not list"),
        ({"begin": 1}, "begin: there is no such option; the options are task_id, "),
    ],
    ids=str,
)
async def test_an_option_that_the_agent_would_refuse_is_refused_here(
    call: Call, options: Any, message: str
) -> None:
    with pytest.raises(InvalidOption) as refused:
        await call.mesh.send(travel, ROME, **options)
    assert message in str(refused.value)
    assert isinstance(refused.value, ValueError)
    await idle()
    assert call.agent.requests == []


async def test_metadata_must_be_json(call: Call) -> None:
    with pytest.raises(NotJson, match=r"metadata\.when"):
        await call.mesh.send(travel, ROME, metadata={"when": timedelta()})  # type: ignore[dict-item]  # wrong on purpose


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (Failed(FailureKind.ERROR, "no train"), TaskFailed, "error: no train"),
        (Failed(FailureKind.TIMEOUT, "too late"), TaskTimeout, "timeout: too late"),
        (Failed(FailureKind.CANCELLED, "stop"), TaskCancelled, "cancelled: stop"),
        (
            Ok({"text": 1}),
            TaskFailed,
            "invalid: output of peer 'travel': Plan: text: Input should be a valid string",
        ),
    ],
    ids=["error", "timeout", "cancelled", "invalid"],
)
async def test_a_task_without_a_result_raises(
    call: Call, answer: Answer, error: type[TaskFailed], text: str
) -> None:
    task = await call.mesh.send(travel, ROME, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(), answer)
    with pytest.raises(TaskFailed) as raised:
        await task.result()
    failed = raised.value
    assert type(failed) is error
    assert isinstance(failed, TimeoutError) == (error is TaskTimeout)
    assert str(failed) == f"task 'order-17' of 'travel': {text}"
    assert (failed.task_id, failed.agent) == ("order-17", "travel")
    assert f"{failed.kind}: {failed.message}" == text
    assert await task.outcome() == failed.outcome


async def test_a_response_that_cannot_be_read_is_an_invalid_outcome(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    await call.agent.respond(await call.agent.wait_for_request(), None, body=b"{}")
    outcome = await task.outcome()
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.INVALID
    assert outcome.message == "the response cannot be read: task: Field required"


async def test_everybody_who_waits_gets_the_outcome(call: Call) -> None:
    one = await call.mesh.send(travel, ROME, task_id="order-17")
    other = await call.mesh.send(travel, ROME, task_id="order-17")
    waits = [asyncio.create_task(task.result()) for task in (one, one, other)]
    gives_up = asyncio.create_task(one.result())
    await idle()
    gives_up.cancel()
    await call.agent.respond(await call.agent.wait_for_request(2), {"text": "by train"})
    assert await asyncio.gather(*waits) == [Plan(text="by train")] * 3
    assert gives_up.cancelled()
    assert await one.result() == await other.result() == Plan(text="by train")


async def test_only_the_first_reply_of_the_agent_counts(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    await call.agent.respond(request, {"text": "forged"}, app_id="mallory")
    await call.agent.respond(request, {"text": "first"})
    await call.agent.respond(request, {"text": "second"})
    await idle()
    assert await task.result() == Plan(text="first")


@pytest.mark.parametrize("failure", ["not stored", "in doubt"])
async def test_a_send_in_doubt_can_be_repeated(call: Call, failure: str) -> None:
    call.broker.failures.append(failure)
    with pytest.raises(SendInDoubt, match=r"the task may have started: repeat with task_id='"):
        await call.mesh.send(travel, ROME)
    call.broker.failures.append(failure)
    with pytest.raises(SendInDoubt) as doubtful:
        await call.mesh.send(travel, ROME, task_id="order-17")
    assert doubtful.value.task_id == "order-17"
    task = await call.mesh.send(travel, ROME, task_id=doubtful.value.task_id)
    await idle()
    sent = [each for each in call.agent.requests if each.correlation_id == "order-17"]
    assert len(sent) == (1 if failure == "not stored" else 2)
    await call.agent.respond(sent[0], {"text": "by train"})
    assert await task.result() == Plan(text="by train")


@pytest.mark.parametrize("failure", [None, "in doubt"])
async def test_an_id_is_not_used_for_another_input(call: Call, failure: str | None) -> None:
    """A reply does not say which input it answers."""
    if failure is None:
        first = await call.mesh.send(travel, ROME, task_id="order-17")
    else:
        call.broker.failures.append(failure)
        with pytest.raises(SendInDoubt):
            await call.mesh.send(travel, ROME, task_id="order-17")
    other = await call.mesh.send(travel, OSLO, task_id="order-17")
    with pytest.raises(TaskFailed, match="task 'order-17' exists with another input"):
        await other.result()
    request = await call.agent.wait_for_request()
    await call.agent.respond(request, {"text": "to Rome"})
    if failure is None:
        assert await first.result() == Plan(text="to Rome")
    again = await call.mesh.send(travel, OSLO, task_id="order-17")
    await call.agent.respond(request, {"text": "to Rome"})
    assert isinstance(await again.outcome(), Failed)
    await idle()
    assert len(call.agent.requests) == 1


async def test_an_id_of_a_request_that_the_broker_refused_may_have_another_input(
    call: Call,
) -> None:
    call.broker.failures.append(PublishResult.REJECTED)
    with pytest.raises(InvalidInput) as refused:
        await call.mesh.send(travel, ROME, task_id="order-17")
    assert refused.tb is not None  # it keeps what the failed call knew
    task = await call.mesh.send(travel, OSLO, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "to Oslo"})
    assert await task.result() == Plan(text="to Oslo")


async def test_an_agent_that_refuses_another_input_ends_only_that_handle(call: Call) -> None:
    task = await call.mesh.send(travel, OSLO, task_id="order-17")
    request = await call.agent.wait_for_request()
    other = call.agent.request({"city": "Lima"}, "order-17")
    await refuse(call, request, refused=other)
    await idle()
    assert call.open_tasks == ["order-17"]
    await refuse(call, request)
    with pytest.raises(TaskFailed, match="the task id is in use by another request"):
        await task.result()
    right = await call.mesh.send(travel, ROME, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(2), {"text": "to Rome"})
    assert await right.result() == Plan(text="to Rome")


async def test_the_same_id_at_another_agent_is_another_task(call: Call) -> None:
    hotels = await call.mesh.send(travel, ROME, task_id="order-17")
    with pytest.raises(UnknownAgent, match="no agent 'hotels' in this mesh"):
        await call.mesh.send("hotels", "Oslo", task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await hotels.result() == Plan(text="by train")


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (PublishResult.UNROUTABLE, UnknownAgent),
        (PublishResult.OVERLOADED, QueueFull),
        (PublishResult.REJECTED, InvalidInput),
    ],
)
async def test_a_request_that_was_not_sent_leaves_nothing(
    call: Call, result: PublishResult, error: type[Exception]
) -> None:
    call.broker.failures.append(result)
    with pytest.raises(error):
        await call.mesh.send(travel, ROME, task_id="order-17")
    assert call.open_tasks == []
    task = await call.mesh.send(travel, OSLO, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "to Oslo"})
    assert await task.result() == Plan(text="to Oslo")


async def test_cancel_names_the_task_and_the_reason(call: Call) -> None:
    task = await call.mesh.send(travel, ROME, task_id="order-17")
    await task.cancel(reason="sold out")
    assert await call.agent.wait_for_cancels() == ["order-17"]
    (cancel,) = call.agent.messages
    assert parse_body(CancelBody, cancel.body).reason == "sold out"
    await call.agent.respond(
        await call.agent.wait_for_request(), Failed(FailureKind.CANCELLED, "sold out")
    )
    assert isinstance(await task.outcome(), Failed)
    await task.cancel()
    await idle()
    assert call.agent.cancels() == ["order-17"], "an ended task is not cancelled"


async def test_a_missing_answer_is_a_timeout_after_the_deadline(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_task, "ANSWER_GRACE", 0.0)
    task = await call.mesh.send(travel, ROME, task_id="order-17", timeout=0.001)
    with pytest.raises(TaskTimeout, match="'travel' has not answered by the task's deadline"):
        await task.result()
    request = await call.agent.wait_for_request()
    await call.agent.respond(request, {"text": "too late"})
    await idle()
    assert isinstance(await task.outcome(), Failed), "a task has one outcome"
    await task.cancel()
    assert await call.agent.wait_for_cancels() == ["order-17"], "it may still run"


async def test_an_id_is_free_some_minutes_after_a_late_answer(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_task, "ANSWER_GRACE", 0.0)
    now = 0.0
    call.transport._used_ids._clock = lambda: now
    task = await call.mesh.send(travel, ROME, task_id="order-17", timeout=0.001)
    assert isinstance(await task.outcome(), Failed)
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "too late"})
    await idle()
    now = 601.0
    again = await call.mesh.send(travel, OSLO, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(2), {"text": "by boat"})
    assert await again.result() == Plan(text="by boat")


async def test_a_repeated_send_has_the_later_deadline(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_task, "ANSWER_GRACE", 0.0)
    task = await call.mesh.send(travel, ROME, task_id="order-17", timeout=0.001)
    await call.mesh.send(travel, ROME, task_id="order-17")
    waiting = asyncio.create_task(task.result())
    await idle()
    assert not waiting.done()
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by train"})
    assert await waiting == Plan(text="by train")


async def test_closing_ends_all_waits(call: Call) -> None:
    ended, task = await call.mesh.send(travel, OSLO), await call.mesh.send(travel, ROME)
    await call.agent.respond(await call.agent.wait_for_request(), {"text": "by boat"})
    assert await ended.result() == Plan(text="by boat")
    updates = task.updates()
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(task.result()),
        asyncio.ensure_future(anext(updates)),
    ]
    await idle()
    await call.mesh.aclose()
    for wait in waits:
        with pytest.raises(MeshClosed, match=f"task '{task.id}' of 'travel'"):
            await wait
    assert await ended.result() == Plan(text="by boat")
    with pytest.raises(MeshClosed, match="connect again"):
        await call.mesh.send(travel, ROME)


async def test_handles_and_the_mesh_say_what_they_are(call: Call) -> None:
    task = await call.mesh.send(travel, ROME, task_id="order-17")
    assert repr(task) == "TaskHandle('travel', 'order-17')"
    assert repr(call.mesh) == "Mesh(name='api')"
    assert call.mesh.name == "api"
