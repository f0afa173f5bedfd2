"""Permissions, tested with two logins of a real RabbitMQ and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from live import SLOW_BROKER_TIMEOUT

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.local import local_mesh
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, Message, request_queue, response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.settings import MeshSettings
from meshpoint.wiring import make_broker
from plain_client import PlainClient, Reply
from recorded_events import RecordedEvents
from servers import RabbitServer

pytestmark = pytest.mark.servers

ECHO, SLOW = AgentName("echo"), AgentName("slow")
slow_peer = Peer("slow", str, str)


class Gates:
    """Gates at which `slow` waits."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()


GATES: list[Gates] = []


@agent("slow", version="1")
async def slow_agent(ctx: TaskExecutionContext, said: str) -> str:
    GATES[-1].reached.set()
    await GATES[-1].opened.wait()
    return said


@agent("echo", version="1")
async def echo_agent(ctx: TaskExecutionContext, said: str) -> str:
    return await slow_peer(said)


@agent("mended", version="1")
async def mended_agent(ctx: TaskExecutionContext, said: str) -> str:
    await ctx.subtask("begin", str, said)
    if not GATES[-1].opened.is_set():
        raise ValueError("not yet")
    return said


@dataclass
class Environment:
    """A mesh under one login, its client, and a sender under another login."""

    client: PlainClient
    mallory: PlainClient
    events: RecordedEvents
    gates: Gates

    async def publish(self, address: Address, message: Message) -> None:
        await self.mallory._broker.publish([(address, message)])

    async def outcome(self, client: PlainClient, to: str, said: str, task_id: TaskId) -> Outcome:
        return (await (await client.send(to, said, task_id=task_id))).outcome


@pytest_asyncio.fixture
async def mallorys_login(own_rabbit: RabbitServer) -> AsyncIterator[tuple[str, str]]:
    """A separate login, and its URL."""
    name = f"m{new_id()[-12:]}"
    await own_rabbit.add_user(name, "secret")
    yield name, own_rabbit.url.replace("guest:guest", f"{name}:secret")
    await own_rabbit.delete_user(name)


@asynccontextmanager
async def open_environment(
    rabbit: RabbitServer, db_url: str, url: str, **options: Any
) -> AsyncIterator[Environment]:
    namespace, events = f"m{new_id()}", RecordedEvents()
    GATES.append(Gates())
    timeout = SLOW_BROKER_TIMEOUT.total_seconds()
    own_mesh, mesh = [
        MeshSettings(namespace=namespace, broker_url=each, publish_timeout_seconds=timeout)
        for each in (rabbit.url, url)
    ]
    async with (
        local_mesh(
            echo_agent,
            slow_agent,
            mended_agent,
            broker_url=rabbit.url,
            db_url=db_url,
            namespace=namespace,
            observer=events,
            sweep_interval_seconds=0.2,
            **options,
        ),
        PlainClient(make_broker(own_mesh)) as client,
        PlainClient(make_broker(mesh), "mallory") as mallory,
    ):
        yield Environment(client, mallory, events, GATES[-1])


LISTED = {"client": "guest", "echo": ["guest"], "slow": "guest"}


def assert_id_in_use(outcome: Outcome) -> bool:
    """Whether it refuses a request because of its id."""
    return (
        isinstance(outcome, Failed)
        and outcome.kind is FailureKind.INVALID
        and outcome.message.startswith("the task id is in use")
    )


async def start_blocked_task(env: Environment) -> tuple[TaskId, asyncio.Future[Reply]]:
    """Send a request as the client; return once the task runs and waits at the gate."""
    task_id = TaskId(new_id())
    waiting = await env.client.send("echo", "secret", task_id=task_id)
    await env.gates.reached.wait()
    return task_id, waiting


async def test_only_the_requester_gets_the_reply(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    """Another sender uses the id of a running task, and again after the task has ended."""
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id, waiting = await start_blocked_task(env)
        assert assert_id_in_use(await env.outcome(env.mallory, "echo", "secret", task_id))
        env.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")
        assert await env.outcome(env.client, "echo", "secret", task_id) == Ok("secret")
        assert assert_id_in_use(await env.outcome(env.mallory, "echo", "secret", task_id))


async def test_an_id_used_by_another_requester_is_reported_as_in_use(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    """Its rightful owner must not get a reply made for another input."""
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        env.gates.opened.set()
        task_id = TaskId(new_id())
        assert await env.outcome(env.mallory, "echo", "other", task_id) == Ok("other")
        assert assert_id_in_use(await env.outcome(env.client, "echo", "secret", task_id))
        assert await env.outcome(env.client, "echo", "secret", TaskId(new_id())) == Ok("secret")


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_two_requesters_who_use_one_id_at_once_are_both_answered(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], policy: str
) -> None:
    """Repeated several times, because the winner is random."""
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED, ack_policy=policy
    ) as env:
        env.gates.opened.set()
        for _ in range(10):
            task_id = TaskId(new_id())
            own_outcome, other_outcome = await asyncio.gather(
                env.outcome(env.client, "echo", "secret", task_id),
                env.outcome(env.mallory, "echo", "other", task_id),
            )
            assert (own_outcome, assert_id_in_use(other_outcome)) == (Ok("secret"), True) or (
                assert_id_in_use(own_outcome),
                other_outcome,
            ) == (True, Ok("other"))


@pytest.mark.parametrize("name", ["mallory", "client"])
async def test_only_the_requester_can_resume_a_waiting_task(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], name: str
) -> None:
    """Others try under their own name, and under the requester's name with another login."""
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id, waiting = await start_blocked_task(env)
        request = replace(
            env.mallory.request("other", task_id, agent="echo"),
            app_id=name,
            reply_to=Address(f"{name}.private.1"),
        )
        await env.publish(
            request_queue(ECHO), replace(request, headers={Header.RESUME.value: "00000001"})
        )
        await env.events.wait(Step.DEAD_LETTER)
        env.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


@pytest.mark.parametrize(
    "forged",
    [{"app_id": "client"}, {"reply_to": Address("echo.resp")}],
    ids=["another's name", "another's address"],
)
async def test_a_request_with_a_forged_name_or_address_is_not_run(
    own_rabbit: RabbitServer,
    postgres_url: str,
    mallorys_login: tuple[str, str],
    forged: dict[str, Any],
) -> None:
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id = TaskId(new_id())
        await env.publish(
            request_queue(ECHO),
            replace(env.mallory.request("other", task_id, agent="echo"), **forged),
        )
        await env.events.wait(Step.DEAD_LETTER)
        env.gates.opened.set()
        assert await env.outcome(env.client, "echo", "secret", task_id) == Ok("secret")


@pytest.mark.parametrize("name", ["mallory", "client", "echo"])
async def test_only_the_requester_can_cancel(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], name: str
) -> None:
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id, waiting = await start_blocked_task(env)
        await env.publish(response_queue(ECHO), cancel_message(AgentName(name), task_id))
        await env.events.wait(Step.DEAD_LETTER)
        env.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


async def test_only_the_requester_can_resume_a_failed_task(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id = TaskId(new_id())
        assert isinstance(await env.outcome(env.client, "mended", "secret", task_id), Failed)
        env.gates.opened.set()
        request = env.mallory.request("other", task_id, agent="mended")
        resume = replace(request, headers={Header.RESUME.value: "00000001"})
        await env.publish(request_queue(AgentName("mended")), resume)
        await env.publish(
            request_queue(AgentName("mended")), replace(resume, app_id="client", reply_to=None)
        )
        await env.events.wait(Step.DEAD_LETTER, count=2)
        reply = env.client.expect("mended", task_id)
        own_outcome = replace(
            env.client.request("secret", task_id, agent="mended"),
            headers={Header.RESUME.value: "00000001"},
        )
        await env.client._broker.publish([(request_queue(AgentName("mended")), own_outcome)])
        assert (await reply).outcome == Ok("secret")


async def test_an_early_cancel_by_another_sender_reserves_no_id(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id = TaskId(new_id())
        await env.mallory.cancel("echo", task_id)
        await env.events.wait(Step.CANCEL, count=2)  # before and after
        env.gates.opened.set()
        assert await env.outcome(env.client, "echo", "secret", task_id) == Ok("secret")


async def test_a_cancel_to_the_wrong_agent_reserves_no_id(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED
    ) as env:
        task_id = TaskId(new_id())
        await env.client.cancel("slow", task_id)
        await env.events.wait(Step.CANCEL, count=2)
        env.gates.opened.set()
        assert await env.outcome(env.client, "echo", "secret", task_id) == Ok("secret")


@pytest.mark.parametrize("logins", [LISTED, {}], ids=["listed", "any login"])
async def test_a_malformed_request_ends_no_call(
    own_rabbit: RabbitServer,
    postgres_url: str,
    mallorys_login: tuple[str, str],
    logins: dict[str, Any],
) -> None:
    """It carries the ids of a call of `echo`, and asks for the refusal to be sent to `echo`."""
    async with open_environment(
        own_rabbit, postgres_url, mallorys_login[1], peer_logins=logins
    ) as env:
        waiting = await env.client.send("echo", "secret")
        await env.gates.reached.wait()
        (dispatched,) = [
            event for event in env.events.all if event.step is Step.SEGMENT and event.agent == SLOW
        ]
        (segment_event,) = [
            event for event in env.events.all if event.step is Step.SEGMENT and event.agent == ECHO
        ][:1]
        bad = replace(
            env.mallory.request("other", dispatched.task_ids[0], agent="echo"),
            body=b"?",
            reply_to=response_queue(ECHO),
            headers={Header.PARENT_TASK.value: segment_event.task_ids[0]},
        )
        await env.publish(request_queue(SLOW), bad)
        await env.publish(request_queue(SLOW), replace(bad, app_id="echo"))
        await env.events.wait(Step.DEAD_LETTER, count=2 if logins else 3)
        env.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


async def test_an_operators_login_can_cancel(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    name, url = mallorys_login
    async with open_environment(own_rabbit, postgres_url, url, operator_logins=[name]) as env:
        task_id = TaskId(new_id())
        waiting = await env.client.send(
            "echo", "secret", task_id=task_id, timeout=timedelta(minutes=5)
        )
        await env.gates.reached.wait()
        await env.mallory.cancel("echo", task_id)
        outcome = (await waiting).outcome
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.CANCELLED
        env.gates.opened.set()
