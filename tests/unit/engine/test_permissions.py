"""A task id is not a credential: only its requester may repeat, resume or cancel a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate, Steps, asker, doubler
from .mesh import Mesh
from .resuming import failing_until_fixed

BACKENDS = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])
ID_IN_USE = "the task id is in use"


@pytest.fixture
async def mallory(mesh: Mesh) -> FakePeer:
    """A sender without any rights."""
    return await mesh.fake_peer("mallory")


def echo_agent(gate: Gate | None = None, name: str = "echo") -> Any:
    """Waits at `gate` if given, calls `peer`, and returns its own input."""

    @agent(name)
    async def ask(ctx: TaskExecutionContext, text: Any) -> Any:
        if gate is not None:
            await gate()
        await Peer("peer", int, int)(1)
        return text

    return ask


def assert_refused(fake_peer: FakePeer, task_id: str) -> bool:
    """Whether the only reply says that the id is in use."""
    (reply,) = fake_peer.replies(task_id)
    return (
        isinstance(reply, Failed)
        and reply.kind is FailureKind.INVALID
        and reply.message.startswith(ID_IN_USE)
    )


@BACKENDS
async def test_the_reply_of_a_task_goes_to_its_requester_only(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool
) -> None:
    await mesh.replica(echo_agent(), durable=durable)
    task_id = await client.ask("echo", "secret")
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok("secret")
    await mesh.idle()
    for text in ("secret", "other"):
        mallory.messages.clear()
        await mallory.ask("echo", text, task_id)
        await mesh.idle()
        assert assert_refused(mallory, task_id)
    client.messages.clear()
    await client.ask("echo", "secret", task_id)
    assert await client.reply(task_id) == Ok("secret")
    assert len(peer.requests) == 1
    assert len(mesh.dead_letters("echo")) == 2
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@BACKENDS
async def test_a_waiting_task_is_not_shared(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool
) -> None:
    await mesh.replica(echo_agent(), durable=durable)
    task_id = await client.ask("echo", "secret")
    call = await peer.wait_for_request()
    await mallory.ask("echo", "secret", task_id)
    await mesh.idle()
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok("secret")
    assert assert_refused(mallory, task_id)
    await mesh.idle()
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@BACKENDS
@pytest.mark.parametrize("state", ["running", "waiting", "ended"])
async def test_another_request_under_the_same_id_is_refused(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, state: str
) -> None:
    gate = Gate()
    await mesh.replica(echo_agent(gate), durable=durable)
    task_id = await client.ask("echo", {"to": {"city": "Rome"}})
    await gate.wait_reached()
    if state == "running":
        await client.ask("echo", {"to": {"city": "Oslo"}}, task_id)
        assert has_other_input(client, await client.reply(task_id), task_id)
    gate.opened.set()
    call = await peer.wait_for_request()
    if state == "waiting":
        await client.ask("echo", {"to": {"city": "Oslo"}}, task_id)
        assert has_other_input(client, await client.reply(task_id), task_id)
    await peer.respond(call, 1)
    await mesh.idle()
    if state == "ended":
        assert await client.reply(task_id) == Ok({"to": {"city": "Rome"}})
        client.messages.clear()
        await client.ask("echo", {"to": {"city": "Oslo"}}, task_id)
        # The row of an ended task has no request to compare with.
        assert has_other_input(client, await client.reply(task_id), task_id, "")
    else:
        assert client.replies(task_id) == [Ok({"to": {"city": "Rome"}})]
    assert len(peer.requests) == 1
    await mesh.idle()
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


def has_other_input(
    client: FakePeer, reply: object, task_id: str, field: str = " (field 'to.city')"
) -> bool:
    """Whether `reply` says that the id has another input. Also clears the received messages."""
    client.messages.clear()
    message = f"task {task_id!r} exists with another input{field}"
    return reply == Failed(FailureKind.INVALID, message)


async def test_the_order_of_keys_does_not_change_an_input(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(echo_agent())
    task_id = await client.ask("echo", {"a": 1, "b": 2})
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"a": 1, "b": 2})
    await mesh.idle()
    client.messages.clear()
    await client.ask("echo", {"b": 2, "a": 1}, task_id)
    assert await client.reply(task_id) == Ok({"a": 1, "b": 2})


@BACKENDS
async def test_a_strangers_request_does_not_block_the_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool
) -> None:
    """The stranger's request is being looked up when the requester repeats its own."""
    replica = await mesh.replica(echo_agent(), durable=durable)
    task_id = await client.ask("echo", "secret")
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok("secret")
    await mesh.idle()
    client.messages.clear()
    lookup_gate = Gate()
    replica.memory.after["lookup"] = lookup_gate
    await mallory.ask("echo", "secret", task_id)
    await lookup_gate.wait_reached()
    await client.ask("echo", "secret", task_id)
    await mesh.idle()
    lookup_gate.opened.set()
    assert await client.reply(task_id) == Ok("secret")
    await mesh.idle()
    assert client.replies(task_id) == [Ok("secret")]
    assert assert_refused(mallory, task_id)


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_two_requesters_who_use_one_id_at_once_are_both_answered(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, policy: AckPolicy
) -> None:
    """Depending on the policy, both first segments run without a row, or both begin at once."""
    gates = [Gate(), Gate()]
    first = await mesh.replica(echo_agent(gates[0]), max_concurrency=1, ack_policy=policy)
    second = await mesh.replica(echo_agent(gates[1]), max_concurrency=1, ack_policy=policy)
    begin_gate = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = begin_gate
    task_id = await client.ask("echo", "client")
    await mallory.ask("echo", "mallory", task_id)
    await begin_gate.wait_reached(2)
    begin_gate.opened.set()
    for gate in gates:
        gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 1)
    replies = [await client.reply(task_id), await mallory.reply(task_id)]
    winner_reply = [reply for reply in replies if isinstance(reply, Ok)]
    loser_reply = [reply for reply in replies if isinstance(reply, Failed)]
    assert len(winner_reply) == len(loser_reply) == 1
    assert winner_reply[0] == Ok("client" if isinstance(replies[0], Ok) else "mallory")
    assert loser_reply[0].message.startswith(ID_IN_USE)
    await mesh.idle()
    assert len(peer.requests) == 1
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@BACKENDS
async def test_two_concurrent_requesters_in_one_replica_are_both_answered(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(echo_agent(gate), durable=durable)
    task_id = await client.ask("echo", "client")
    await gate.wait_reached()
    await mallory.ask("echo", "mallory", task_id)
    await mallory.reply(task_id)
    assert assert_refused(mallory, task_id)
    gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok("client")


async def test_two_agents_that_use_one_id_in_one_database_are_both_answered(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer
) -> None:
    gates = Gate(), Gate()
    await mesh.replica(echo_agent(gates[0], "one"), echo_agent(gates[1], "two"))
    task_id = await client.ask("one", "client")
    await mallory.ask("two", "mallory", task_id)
    await gates[0].wait_reached()
    await gates[1].wait_reached()
    gates[0].opened.set()
    call = await peer.wait_for_request()
    gates[1].opened.set()
    await mallory.reply(task_id)
    assert assert_refused(mallory, task_id)
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok("client")


async def test_a_cancel_of_another_requesters_task_does_not_affect_a_first_run(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer
) -> None:
    gates = [Gate(), Gate()]
    first = await mesh.replica(echo_agent(gates[0]), max_concurrency=1)
    second = await mesh.replica(echo_agent(gates[1]), max_concurrency=1)
    begin_gate = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = begin_gate
    task_id = await client.ask("echo", "client")
    await mallory.ask("echo", "mallory", task_id)
    await begin_gate.wait_reached(2)
    begin_gate.opened.set()
    gates[0].opened.set()
    await peer.wait_for_request()
    winner, loser = (
        (client, mallory)
        if (await task_requester(mesh, task_id)) == "client"
        else (mallory, client)
    )
    await winner.cancel("echo", task_id)
    assert (await winner.reply(task_id)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]  # else the test fails
    gates[1].opened.set()
    await loser.reply(task_id)
    assert assert_refused(loser, task_id)


async def task_requester(mesh: Mesh, task_id: str) -> str | None:
    return (await mesh.store.lookup([TaskId(task_id)]))[TaskId(task_id)].requester


def resend_request(
    fake_peer: FakePeer, task_id: TaskId, input_: Any = 1, retry: int = 1
) -> Message:
    """A request of a resumed requester."""
    return fake_peer.request(
        input_, task_id, parent_task=f"parent~resume-{retry}", resume=f"{retry:08d}"
    )


async def create_failed_child(
    mesh: Mesh, client: FakePeer, **options: Any
) -> tuple[TaskId, Steps]:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a", "b")
    await mesh.replica(child, **options)
    request = replace(client.request(1, parent_task="parent"), user_id="client-login")
    await client.send("agent", request)
    await client.reply(request.correlation_id)
    await mesh.idle()
    is_fixed[0] = True
    client.messages.clear()
    return TaskId(request.correlation_id), steps


@pytest.mark.parametrize("input_", [1, 100], ids=["the same input", "another"])
async def test_an_outsider_cannot_resume(
    mesh: Mesh, client: FakePeer, mallory: FakePeer, input_: int
) -> None:
    task_id, steps = await create_failed_child(mesh, client)
    before = await mesh.task(task_id)
    await mallory.send("agent", resend_request(mallory, task_id, input_))
    await mesh.advance(2)
    assert await mesh.task(task_id) == before
    assert mallory.messages == client.messages == []
    assert mesh.dead_reasons("agent") == [f"task {task_id} belongs to another requester"]
    assert steps.started.names == ["a", "b"]


async def test_an_impostor_cannot_resume(mesh: Mesh, client: FakePeer, mallory: FakePeer) -> None:
    task_id, steps = await create_failed_child(
        mesh, client, peer_logins={"client": "client-login"}
    )
    await mallory.send("agent", replace(resend_request(client, task_id), user_id="mallory"))
    await mesh.advance(2)
    assert await mesh.state(task_id) is TaskState.FAILED
    assert client.messages == []
    assert len(mesh.dead_letters("agent")) == 1
    await client.send("agent", replace(resend_request(client, task_id), user_id="client-login"))
    assert await client.reply(task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]


async def test_a_resume_cannot_change_the_input(mesh: Mesh, client: FakePeer) -> None:
    task_id, steps = await create_failed_child(mesh, client)
    await client.send("agent", resend_request(client, task_id, 100))
    assert has_other_input(client, await client.reply(task_id), task_id, "")
    assert await mesh.state(task_id) is TaskState.FAILED
    assert steps.started.names == ["a", "b"]


async def test_an_outsider_cannot_resume_a_running_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(echo_agent(gate))
    task_id = await client.ask("echo", "secret")
    await gate.wait_reached()
    await mallory.send("echo", resend_request(mallory, task_id, "secret"))
    await mesh.events.wait(Step.DEAD_LETTER)
    gate.opened.set()
    call = await peer.wait_for_request()
    await mesh.idle()
    await mallory.send("echo", resend_request(mallory, task_id, "secret"))
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok("secret")
    assert mallory.messages == []


async def test_an_operator_can_resume_without_taking_the_task(
    mesh: Mesh, client: FakePeer
) -> None:
    ops = await mesh.fake_peer("ops")
    task_id, steps = await create_failed_child(mesh, client, operator_logins=("ops-login",))
    await ops.send("agent", replace(resend_request(ops, task_id), user_id="ops-login"))
    await mesh.advance(2)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert await task_requester(mesh, task_id) == "client"
    assert steps.started.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    await ops.send("agent", replace(ops.request(1, task_id), user_id="ops-login"))
    assert await ops.reply(task_id) == Ok(3)


@BACKENDS
@pytest.mark.parametrize("state", ["running", "waiting", "ended"])
async def test_an_outsider_cannot_cancel(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool, state: str
) -> None:
    gate = Gate()
    replica = await mesh.replica(echo_agent(gate), durable=durable)
    task_id = await client.ask("echo", "secret")
    await gate.wait_reached()
    if state == "running":
        await cancel_as_outsider(mesh, mallory, replica.id, task_id)
    gate.opened.set()
    call = await peer.wait_for_request()
    await mesh.idle()
    if state == "waiting":
        await cancel_as_outsider(mesh, mallory, replica.id, task_id)
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok("secret")
    await mesh.idle()
    if state == "ended":
        await cancel_as_outsider(mesh, mallory, replica.id, task_id)
        client.messages.clear()
        await client.ask("echo", "secret", task_id)
        assert await client.reply(task_id) == Ok("secret")
    assert mallory.messages == []


async def cancel_as_outsider(mesh: Mesh, mallory: FakePeer, replica: str, task_id: TaskId) -> None:
    """Cancel another sender's task through the agent's queue and the replica's private queue."""
    await mallory.cancel("echo", task_id)
    cancel = cancel_message(AgentName("mallory"), task_id, on_behalf_of="client")
    await mallory.send_to_address(f"echo.private.{replica}", cancel)
    await mallory.send_control("echo", cancel)
    await mesh.idle()
    assert f"task {task_id} belongs to another requester" in mesh.dead_reasons("echo")


@BACKENDS
async def test_an_early_cancel_affects_only_its_sender(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, durable: bool
) -> None:
    await mesh.replica(echo_agent(), durable=durable)
    own_id, foreign_id = TaskId(new_id()), TaskId(new_id())
    await client.cancel("echo", own_id)
    await mallory.cancel("echo", foreign_id)
    await mesh.idle()
    await client.ask("echo", "mine", own_id)
    await client.ask("echo", "theirs", foreign_id)
    reply = await client.reply(own_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(foreign_id) == Ok("theirs")
    await mesh.idle()
    assert len(peer.requests) == 1
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@pytest.mark.parametrize("first", ["client", "mallory"])
async def test_a_second_early_cancel_does_not_undo_the_first(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer, first: str
) -> None:
    await mesh.replica(echo_agent())
    task_id = TaskId(new_id())
    for fake_peer in (client, mallory) if first == "client" else (mallory, client):
        await fake_peer.cancel("echo", task_id)
        await mesh.idle()
    await client.ask("echo", 1, task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert peer.requests == []


async def test_a_cancel_during_the_first_segment_affects_only_its_sender(
    mesh: Mesh, client: FakePeer, peer: FakePeer, mallory: FakePeer
) -> None:
    """The cancel's tombstone occupies the row that the first pause writes."""
    gate = Gate()
    await mesh.replica(echo_agent(gate))
    task_id = await client.ask("echo", "secret")
    await gate.wait_reached()
    await mallory.cancel("echo", task_id)
    await mesh.idle()
    gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok("secret")
    assert await task_requester(mesh, task_id) == "client"


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_a_cancel_sent_to_the_wrong_agent_reserves_no_id(
    mesh: Mesh, client: FakePeer, peer: FakePeer, policy: AckPolicy
) -> None:
    await mesh.replica(echo_agent(), doubler, ack_policy=policy)
    task_id = TaskId(new_id())
    await client.cancel("doubler", task_id)
    await mesh.idle()
    await client.ask("echo", "secret", task_id)
    call = await peer.wait_for_request()
    await client.cancel("doubler", task_id)
    await mesh.idle()
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok("secret")


@BACKENDS
@pytest.mark.parametrize("sender", ["client", "echo", "operator"])
async def test_only_authorized_senders_can_cancel(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, sender: str
) -> None:
    await mesh.replica(echo_agent(), durable=durable, operator_logins=("ops-login",))
    task_id = await client.ask("echo", "secret")
    await peer.wait_for_request()
    await mesh.idle()
    if sender == "operator":
        await client.send_control(
            "echo", replace(cancel_message(AgentName("ops"), task_id), user_id="ops-login")
        )
    else:
        await client.send_control("echo", cancel_message(AgentName(sender), task_id))
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert mesh.dead_letters("echo") == []


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "body": {"body": b"?"},
    "deadline": {"headers": {Header.DEADLINE.value: "soon"}},
    "attempt": {"headers": {Header.ATTEMPT.value: -1}},
    "past": {"headers": {Header.DEADLINE.value: 1.0}},
    "depth": {"headers": {Header.CALL_DEPTH.value: 1000}},
    "other input": {},
}


@BACKENDS
@pytest.mark.parametrize("bad", BAD_REQUESTS)
async def test_a_refused_forgery_ends_no_call(
    mesh: Mesh, client: FakePeer, mallory: FakePeer, durable: bool, bad: str
) -> None:
    """No logins are listed, so the forged request appears to come from `asker`."""
    gate = Gate()
    asking = await mesh.replica(asker("asker", "slow"), durable=durable)
    await mesh.replica(slow_agent(gate))
    task_id = await client.ask("asker", 1)
    await gate.wait_reached()
    (call,) = [
        message for _, message in asking.broker.published if message.type is MessageType.REQUEST
    ]
    fields = dict(BAD_REQUESTS[bad])
    headers = {**call.headers, **fields.pop("headers", {})}
    forged = replace(
        mallory.request(100, call.correlation_id), app_id="asker", reply_to=call.reply_to
    )
    if bad in {"deadline", "attempt", "past", "depth"}:
        forged = replace(forged, body=call.body)
    await mallory.send("slow", replace(forged, headers=headers, **fields))
    await mesh.idle()
    gate.opened.set()
    assert await client.reply(task_id) == Ok({"slow": 2})


@BACKENDS
async def test_a_refusal_of_the_call_itself_is_its_outcome(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "slow"), durable=durable)
    await mesh.replica(slow_agent(Gate()), max_message_bytes=10)
    assert await client.reply(await client.ask("asker", 1)) == Ok({"slow": "invalid"})


def slow_agent(gate: Gate) -> Any:
    @agent("slow")
    async def double(ctx: TaskExecutionContext, number: int) -> int:
        await gate()
        return 2 * number

    return double
