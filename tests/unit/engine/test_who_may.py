"""A task id is not a credential: only its requester may repeat, resume or cancel a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Steps, asker, doubler
from .mesh import Mesh
from .puppet import Puppet
from .resuming import mending

HOMES = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])
IN_USE = "the task id is in use"


@pytest.fixture
async def mallory(mesh: Mesh) -> Puppet:
    """A sender without any rights."""
    return await mesh.puppet("mallory")


def echo(gate: Gate | None = None, name: str = "echo") -> Any:
    """Waits at `gate` if given, calls `peer`, and returns its own input."""

    @agent(name)
    async def ask(ctx: TaskExecutionContext, said: Any) -> Any:
        if gate is not None:
            await gate()
        await ctx.call(Peer("peer", int, int)(1))
        return said

    return ask


def refused(puppet: Puppet, task_id: str) -> bool:
    """Whether the only reply says that the id is in use."""
    (reply,) = puppet.replies(task_id)
    return isinstance(reply, Failed) and reply.kind is FailureKind.INVALID and reply.message.startswith(IN_USE)


@HOMES
async def test_the_reply_of_a_task_goes_to_its_requester_only(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool
) -> None:
    await mesh.replica(echo(), durable=durable)
    task_id = await boss.ask("echo", "secret")
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok("secret")
    await mesh.settle()
    for said in ("secret", "other"):
        mallory.letters.clear()
        await mallory.ask("echo", said, task_id)
        await mesh.settle()
        assert refused(mallory, task_id)
    boss.letters.clear()
    await boss.ask("echo", "secret", task_id)
    assert await boss.reply(task_id) == Ok("secret")
    assert len(peer.requests) == 1
    assert len(mesh.dead_letters("echo")) == 2
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@HOMES
async def test_a_waiting_task_is_not_shared(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool
) -> None:
    await mesh.replica(echo(), durable=durable)
    task_id = await boss.ask("echo", "secret")
    call = await peer.request_number()
    await mallory.ask("echo", "secret", task_id)
    await mesh.settle()
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok("secret")
    assert refused(mallory, task_id)
    await mesh.settle()
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@HOMES
@pytest.mark.parametrize("when", ["running", "waiting", "ended"])
async def test_the_same_requester_asks_for_something_else(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, when: str
) -> None:
    gate = Gate()
    await mesh.replica(echo(gate), durable=durable)
    task_id = await boss.ask("echo", "first")
    await gate.reach()
    if when == "running":
        await boss.ask("echo", "second", task_id)
        assert refused_once(boss, await boss.reply(task_id))
    gate.opened.set()
    call = await peer.request_number()
    if when == "waiting":
        await boss.ask("echo", "second", task_id)
        assert refused_once(boss, await boss.reply(task_id))
    await peer.respond(call, 1)
    await mesh.settle()
    if when == "ended":
        assert await boss.reply(task_id) == Ok("first")
        boss.letters.clear()
        await boss.ask("echo", "second", task_id)
        assert refused_once(boss, await boss.reply(task_id))
    else:
        assert boss.replies(task_id) == [Ok("first")]
    assert len(peer.requests) == 1
    await mesh.settle()
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


def refused_once(boss: Puppet, reply: object) -> bool:
    """Whether `reply` says that the id is in use. Also clears the received messages."""
    boss.letters.clear()
    return isinstance(reply, Failed) and reply.message.startswith(IN_USE)


async def test_the_order_of_keys_does_not_make_another_input(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(echo())
    task_id = await boss.ask("echo", {"a": 1, "b": 2})
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok({"a": 1, "b": 2})
    await mesh.settle()
    boss.letters.clear()
    await boss.ask("echo", {"b": 2, "a": 1}, task_id)
    assert await boss.reply(task_id) == Ok({"a": 1, "b": 2})


@HOMES
async def test_a_stranger_at_the_door_does_not_keep_the_requester_out(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool
) -> None:
    """The stranger's request is being looked up when the requester repeats its own."""
    running = await mesh.replica(echo(), durable=durable)
    task_id = await boss.ask("echo", "secret")
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok("secret")
    await mesh.settle()
    boss.letters.clear()
    looking = Gate()
    running.memory.after["lookup"] = looking
    await mallory.ask("echo", "secret", task_id)
    await looking.reach()
    await boss.ask("echo", "secret", task_id)
    await mesh.settle()
    looking.opened.set()
    assert await boss.reply(task_id) == Ok("secret")
    await mesh.settle()
    assert boss.replies(task_id) == [Ok("secret")]
    assert refused(mallory, task_id)


@pytest.mark.parametrize("policy", list(AckPolicy))
async def test_two_requesters_who_use_one_id_at_once_are_both_answered(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, policy: AckPolicy
) -> None:
    """Depending on the policy, both first segments run without a row, or both begin at once."""
    gates = [Gate(), Gate()]
    first = await mesh.replica(echo(gates[0]), max_concurrency=1, ack_policy=policy)
    second = await mesh.replica(echo(gates[1]), max_concurrency=1, ack_policy=policy)
    both = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both
    task_id = await boss.ask("echo", "boss")
    await mallory.ask("echo", "mallory", task_id)
    await both.reach(2)
    both.opened.set()
    for gate in gates:
        gate.opened.set()
    await peer.respond(await peer.request_number(), 1)
    replies = [await boss.reply(task_id), await mallory.reply(task_id)]
    won = [reply for reply in replies if isinstance(reply, Ok)]
    lost = [reply for reply in replies if isinstance(reply, Failed)]
    assert len(won) == len(lost) == 1
    assert won[0] == Ok("boss" if isinstance(replies[0], Ok) else "mallory")
    assert lost[0].message.startswith(IN_USE)
    await mesh.settle()
    assert len(peer.requests) == 1
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@HOMES
async def test_two_requesters_at_once_in_one_replica(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(echo(gate), durable=durable)
    task_id = await boss.ask("echo", "boss")
    await gate.reach()
    await mallory.ask("echo", "mallory", task_id)
    await mallory.reply(task_id)
    assert refused(mallory, task_id)
    gate.opened.set()
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok("boss")


async def test_two_agents_of_one_database_and_one_id_at_once(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet
) -> None:
    gates = Gate(), Gate()
    await mesh.replica(echo(gates[0], "one"), echo(gates[1], "two"))
    task_id = await boss.ask("one", "boss")
    await mallory.ask("two", "mallory", task_id)
    await gates[0].reach()
    await gates[1].reach()
    gates[0].opened.set()
    call = await peer.request_number()
    gates[1].opened.set()
    await mallory.reply(task_id)
    assert refused(mallory, task_id)
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok("boss")


async def test_a_first_run_over_a_task_that_was_cancelled_is_not_cancelled(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet
) -> None:
    gates = [Gate(), Gate()]
    first = await mesh.replica(echo(gates[0]), max_concurrency=1)
    second = await mesh.replica(echo(gates[1]), max_concurrency=1)
    both = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both
    task_id = await boss.ask("echo", "boss")
    await mallory.ask("echo", "mallory", task_id)
    await both.reach(2)
    both.opened.set()
    gates[0].opened.set()
    await peer.request_number()
    winner, loser = (boss, mallory) if (await owner(mesh, task_id)) == "boss" else (mallory, boss)
    await winner.cancel("echo", task_id)
    assert (await winner.reply(task_id)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]
    gates[1].opened.set()
    await loser.reply(task_id)
    assert refused(loser, task_id)


async def owner(mesh: Mesh, task_id: str) -> str | None:
    return (await mesh.store.lookup([TaskId(task_id)]))[TaskId(task_id)].requester


def again(puppet: Puppet, task_id: TaskId, input_: Any = 1, retry: int = 1) -> Message:
    """A request of a resumed requester."""
    return puppet.request(input_, task_id, parent_task=f"parent~resume-{retry}", resume=f"{retry:08d}")


async def failed_child(mesh: Mesh, boss: Puppet, **options: Any) -> tuple[TaskId, Steps]:
    steps = Steps()
    tested, works = mending(steps, "a", "b")
    await mesh.replica(tested, **options)
    request = replace(boss.request(1, parent_task="parent"), user_id="boss-login")
    await boss.send("agent", request)
    await boss.reply(request.correlation_id)
    await mesh.settle()
    works[0] = True
    boss.letters.clear()
    return TaskId(request.correlation_id), steps


@pytest.mark.parametrize("input_", [1, 100], ids=["the same input", "another"])
async def test_an_outsider_does_not_resume(mesh: Mesh, boss: Puppet, mallory: Puppet, input_: int) -> None:
    task_id, steps = await failed_child(mesh, boss)
    before = await mesh.task(task_id)
    await mallory.send("agent", again(mallory, task_id, input_))
    await mesh.advance(2)
    assert await mesh.task(task_id) == before
    assert mallory.letters == boss.letters == []
    assert len(mesh.dead_letters("agent")) == 1
    assert steps.ran.names == ["a", "b"]


async def test_an_impostor_does_not_resume(mesh: Mesh, boss: Puppet, mallory: Puppet) -> None:
    task_id, steps = await failed_child(mesh, boss, peer_logins={"boss": "boss-login"})
    await mallory.send("agent", replace(again(boss, task_id), user_id="mallory"))
    await mesh.advance(2)
    assert await mesh.state(task_id) is TaskState.FAILED
    assert boss.letters == []
    assert len(mesh.dead_letters("agent")) == 1
    await boss.send("agent", replace(again(boss, task_id), user_id="boss-login"))
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]


async def test_a_resume_does_not_bring_another_input(mesh: Mesh, boss: Puppet) -> None:
    task_id, steps = await failed_child(mesh, boss)
    await boss.send("agent", again(boss, task_id, 100))
    await boss.reply(task_id)
    assert refused(boss, task_id)
    assert await mesh.state(task_id) is TaskState.FAILED
    assert steps.ran.names == ["a", "b"]


async def test_an_outsider_does_not_resume_a_task_at_work(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet
) -> None:
    gate = Gate()
    await mesh.replica(echo(gate))
    task_id = await boss.ask("echo", "secret")
    await gate.reach()
    await mallory.send("echo", again(mallory, task_id, "secret"))
    await mesh.events.wait(Step.DEAD_LETTER)
    gate.opened.set()
    call = await peer.request_number()
    await mesh.settle()
    await mallory.send("echo", again(mallory, task_id, "secret"))
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok("secret")
    assert mallory.letters == []


async def test_an_operator_resumes_and_the_requester_keeps_its_task(mesh: Mesh, boss: Puppet) -> None:
    ops = await mesh.puppet("ops")
    task_id, steps = await failed_child(mesh, boss, operator_logins=("ops-login",))
    await ops.send("agent", replace(again(ops, task_id), user_id="ops-login"))
    await mesh.advance(2)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert await owner(mesh, task_id) == "boss"
    assert steps.ran.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    await ops.send("agent", replace(ops.request(1, task_id), user_id="ops-login"))
    assert await ops.reply(task_id) == Ok(3)


@HOMES
@pytest.mark.parametrize("when", ["running", "waiting", "ended"])
async def test_an_outsider_does_not_cancel(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool, when: str
) -> None:
    gate = Gate()
    running = await mesh.replica(echo(gate), durable=durable)
    task_id = await boss.ask("echo", "secret")
    await gate.reach()
    if when == "running":
        await meddle(mesh, mallory, running.id, task_id)
    gate.opened.set()
    call = await peer.request_number()
    await mesh.settle()
    if when == "waiting":
        await meddle(mesh, mallory, running.id, task_id)
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok("secret")
    await mesh.settle()
    if when == "ended":
        await meddle(mesh, mallory, running.id, task_id)
        boss.letters.clear()
        await boss.ask("echo", "secret", task_id)
        assert await boss.reply(task_id) == Ok("secret")
    assert mallory.letters == []


async def meddle(mesh: Mesh, mallory: Puppet, replica: str, task_id: TaskId) -> None:
    """Cancel another sender's task through the agent's queue and the replica's private queue."""
    await mallory.cancel("echo", task_id)
    cancel = cancel_message(AgentName("mallory"), task_id, on_behalf_of="boss")
    await mallory.say_to(f"echo.private.{replica}", cancel)
    await mallory.letter("echo", cancel)
    await mesh.settle()


@HOMES
async def test_a_cancel_before_the_request_binds_its_sender_only(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, durable: bool
) -> None:
    await mesh.replica(echo(), durable=durable)
    mine, theirs = TaskId(new_id()), TaskId(new_id())
    await boss.cancel("echo", mine)
    await mallory.cancel("echo", theirs)
    await mesh.settle()
    await boss.ask("echo", "mine", mine)
    await boss.ask("echo", "theirs", theirs)
    reply = await boss.reply(mine)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(theirs) == Ok("theirs")
    await mesh.settle()
    assert len(peer.requests) == 1
    assert mesh.unacked("echo") == mesh.waiting("echo") == 0


@pytest.mark.parametrize("first", ["boss", "mallory"])
async def test_a_further_cancel_before_the_request_undoes_none(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet, first: str
) -> None:
    await mesh.replica(echo())
    task_id = TaskId(new_id())
    for puppet in (boss, mallory) if first == "boss" else (mallory, boss):
        await puppet.cancel("echo", task_id)
        await mesh.settle()
    await boss.ask("echo", 1, task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert peer.requests == []


async def test_a_cancel_during_the_first_segment_binds_its_sender_only(
    mesh: Mesh, boss: Puppet, peer: Puppet, mallory: Puppet
) -> None:
    """The cancel's tombstone occupies the row that the first pause writes."""
    gate = Gate()
    await mesh.replica(echo(gate))
    task_id = await boss.ask("echo", "secret")
    await gate.reach()
    await mallory.cancel("echo", task_id)
    await mesh.settle()
    gate.opened.set()
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok("secret")
    assert await owner(mesh, task_id) == "boss"


@pytest.mark.parametrize("policy", list(AckPolicy))
async def test_a_cancel_sent_to_the_wrong_agent_takes_no_id(
    mesh: Mesh, boss: Puppet, peer: Puppet, policy: AckPolicy
) -> None:
    await mesh.replica(echo(), doubler, ack_policy=policy)
    task_id = TaskId(new_id())
    await boss.cancel("doubler", task_id)
    await mesh.settle()
    await boss.ask("echo", "secret", task_id)
    call = await peer.request_number()
    await boss.cancel("doubler", task_id)
    await mesh.settle()
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok("secret")


@HOMES
@pytest.mark.parametrize("who", ["boss", "echo", "operator"])
async def test_who_may_cancel(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, who: str) -> None:
    await mesh.replica(echo(), durable=durable, operator_logins=("ops-login",))
    task_id = await boss.ask("echo", "secret")
    await peer.request_number()
    await mesh.settle()
    if who == "operator":
        await boss.letter("echo", replace(cancel_message(AgentName("ops"), task_id), user_id="ops-login"))
    else:
        await boss.letter("echo", cancel_message(AgentName(who), task_id))
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert mesh.dead_letters("echo") == []


BAD: dict[str, dict[str, Any]] = {
    "body": {"body": b"?"},
    "deadline": {"headers": {Header.DEADLINE.value: "soon"}},
    "attempt": {"headers": {Header.ATTEMPT.value: -1}},
    "past": {"headers": {Header.DEADLINE.value: 1.0}},
    "depth": {"headers": {Header.CALL_DEPTH.value: 1000}},
    "other input": {},
}


@HOMES
@pytest.mark.parametrize("bad", BAD)
async def test_what_a_forger_is_refused_ends_nobodys_call(
    mesh: Mesh, boss: Puppet, mallory: Puppet, durable: bool, bad: str
) -> None:
    """No logins are listed, so the forged request appears to come from `asker`."""
    gate = Gate()
    asking = await mesh.replica(asker("asker", "slow"), durable=durable)
    await mesh.replica(slow(gate))
    task_id = await boss.ask("asker", 1)
    await gate.reach()
    (call,) = [message for _, message in asking.broker.published if message.type is MessageType.REQUEST]
    fields = dict(BAD[bad])
    headers = {**call.headers, **fields.pop("headers", {})}
    forged = replace(mallory.request(100, call.correlation_id), app_id="asker", reply_to=call.reply_to)
    if bad in {"deadline", "attempt", "past", "depth"}:
        forged = replace(forged, body=call.body)
    await mallory.send("slow", replace(forged, headers=headers, **fields))
    await mesh.settle()
    gate.opened.set()
    assert await boss.reply(task_id) == Ok({"slow": 2})


@HOMES
async def test_a_refusal_of_the_call_itself_is_its_outcome(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "slow"), durable=durable)
    await mesh.replica(slow(Gate()), max_message_bytes=10)
    assert await boss.reply(await boss.ask("asker", 1)) == Ok({"slow": "invalid"})


def slow(gate: Gate) -> Any:
    @agent("slow")
    async def double(ctx: TaskExecutionContext, number: int) -> int:
        await gate()
        return 2 * number

    return double
