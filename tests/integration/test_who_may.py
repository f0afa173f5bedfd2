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

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.client import Client, Reply
from meshpoint.local import local_mesh
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, Message, requests_of, responses_of
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.settings import MeshSettings
from meshpoint.wiring import make_broker
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
async def slow(ctx: TaskExecutionContext, said: str) -> str:
    GATES[-1].reached.set()
    await GATES[-1].opened.wait()
    return said


@agent("echo", version="1")
async def echo(ctx: TaskExecutionContext, said: str) -> str:
    return await ctx.call(slow_peer(said))


@agent("mended", version="1")
async def mended(ctx: TaskExecutionContext, said: str) -> str:
    await ctx.subtask("begin", str, said)
    if not GATES[-1].opened.is_set():
        raise ValueError("not yet")
    return said


class Events:
    """Records and awaits events."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._changed = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.all.append(event)
        self._changed.set()

    async def wait(self, step: Step, count: int = 1) -> list[Event]:
        while len(found := [event for event in self.all if event.step is step]) < count:
            self._changed.clear()
            await self._changed.wait()
        return found


@dataclass
class Scene:
    """A mesh under one login, its client, and a sender under another login."""

    client: Client
    mallory: Client
    events: Events
    gates: Gates

    async def publish(self, address: Address, message: Message) -> None:
        await self.mallory._broker.publish([(address, message)])

    async def outcome(self, client: Client, to: str, said: str, task_id: TaskId) -> Outcome:
        return (await (await client.send(to, said, task_id=task_id))).outcome


@pytest_asyncio.fixture
async def mallorys_login(own_rabbit: RabbitServer) -> AsyncIterator[tuple[str, str]]:
    """A separate login, and its URL."""
    name = f"m{new_id()[-12:]}"
    await own_rabbit.control("add_user", name, "secret")
    await own_rabbit.control("set_permissions", name, ".*", ".*", ".*")
    yield name, own_rabbit.url.replace("guest:guest", f"{name}:secret")
    await own_rabbit.control("delete_user", name)


@asynccontextmanager
async def scene(rabbit: RabbitServer, db_url: str, url: str, **options: Any) -> AsyncIterator[Scene]:
    namespace, events = f"m{new_id()}", Events()
    GATES.append(Gates())
    mesh = MeshSettings(namespace=namespace, broker_url=url)
    async with (
        local_mesh(
            echo,
            slow,
            mended,
            broker_url=rabbit.url,
            db_url=db_url,
            namespace=namespace,
            observer=events,
            sweep_interval_seconds=0.2,
            **options,
        ) as client,
        Client(make_broker(mesh), "mallory") as mallory,
    ):
        yield Scene(client, mallory, events, GATES[-1])


LISTED = {"client": "guest", "echo": ["guest"], "slow": "guest"}


def in_use(outcome: Outcome) -> bool:
    """Whether it refuses a request because of its id."""
    return (
        isinstance(outcome, Failed)
        and outcome.kind is FailureKind.INVALID
        and outcome.message.startswith("the task id is in use")
    )


async def at_work(here: Scene) -> tuple[TaskId, asyncio.Future[Reply]]:
    """Send a request as the client; return once the task runs and waits at the gate."""
    task_id = TaskId(new_id())
    waiting = await here.client.send("echo", "secret", task_id=task_id)
    await here.gates.reached.wait()
    return task_id, waiting


async def test_a_reply_is_for_its_requester_only(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    """Another sender uses the id of a running task, and again after the task has ended."""
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id, waiting = await at_work(here)
        assert in_use(await here.outcome(here.mallory, "echo", "secret", task_id))
        here.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")
        assert await here.outcome(here.client, "echo", "secret", task_id) == Ok("secret")
        assert in_use(await here.outcome(here.mallory, "echo", "secret", task_id))


async def test_an_id_that_another_used_first_is_told_to_be_in_use(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    """Its rightful owner must not get a reply made for another input."""
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        here.gates.opened.set()
        task_id = TaskId(new_id())
        assert await here.outcome(here.mallory, "echo", "other", task_id) == Ok("other")
        assert in_use(await here.outcome(here.client, "echo", "secret", task_id))
        assert await here.outcome(here.client, "echo", "secret", TaskId(new_id())) == Ok("secret")


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_two_requesters_who_use_one_id_at_once_are_both_answered(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], policy: str
) -> None:
    """Repeated several times, because the winner is random."""
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED, ack_policy=policy) as here:
        here.gates.opened.set()
        for _ in range(10):
            task_id = TaskId(new_id())
            mine, others = await asyncio.gather(
                here.outcome(here.client, "echo", "secret", task_id),
                here.outcome(here.mallory, "echo", "other", task_id),
            )
            assert (mine, in_use(others)) == (Ok("secret"), True) or (in_use(mine), others) == (True, Ok("other"))


@pytest.mark.parametrize("name", ["mallory", "client"])
async def test_nobody_else_resumes_a_task_that_waits(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], name: str
) -> None:
    """Others try under their own name, and under the requester's name with another login."""
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id, waiting = await at_work(here)
        request = replace(here.mallory.request("other", task_id), app_id=name, reply_to=Address(f"{name}.private.1"))
        await here.publish(requests_of(ECHO), replace(request, headers={Header.RESUME.value: "00000001"}))
        await here.events.wait(Step.DEAD_LETTER)
        here.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


@pytest.mark.parametrize(
    "forged",
    [{"app_id": "client"}, {"reply_to": Address("echo.resp")}],
    ids=["another's name", "another's address"],
)
async def test_a_request_under_anothers_name_or_address_is_not_run(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], forged: dict[str, Any]
) -> None:
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id = TaskId(new_id())
        await here.publish(requests_of(ECHO), replace(here.mallory.request("other", task_id), **forged))
        await here.events.wait(Step.DEAD_LETTER)
        here.gates.opened.set()
        assert await here.outcome(here.client, "echo", "secret", task_id) == Ok("secret")


@pytest.mark.parametrize("name", ["mallory", "client", "echo"])
async def test_nobody_else_cancels(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], name: str
) -> None:
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id, waiting = await at_work(here)
        await here.publish(responses_of(ECHO), cancel_message(AgentName(name), task_id))
        await here.events.wait(Step.DEAD_LETTER)
        here.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


async def test_a_failed_task_is_resumed_by_its_requester_only(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id = TaskId(new_id())
        assert isinstance(await here.outcome(here.client, "mended", "secret", task_id), Failed)
        here.gates.opened.set()
        request = here.mallory.request("other", task_id)
        resume = replace(request, headers={Header.RESUME.value: "00000001"})
        await here.publish(requests_of(AgentName("mended")), resume)
        await here.publish(requests_of(AgentName("mended")), replace(resume, app_id="client", reply_to=None))
        await here.events.wait(Step.DEAD_LETTER, count=2)
        again = here.client.expect("mended", task_id)
        mine = replace(here.client.request("secret", task_id), headers={Header.RESUME.value: "00000001"})
        await here.client._broker.publish([(requests_of(AgentName("mended")), mine)])
        assert (await again).outcome == Ok("secret")


async def test_an_early_cancel_by_another_takes_no_id(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id = TaskId(new_id())
        await here.mallory.cancel("echo", task_id)
        await here.events.wait(Step.CANCEL, count=2)  # before and after
        here.gates.opened.set()
        assert await here.outcome(here.client, "echo", "secret", task_id) == Ok("secret")


async def test_a_cancel_to_the_wrong_agent_takes_no_id(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=LISTED) as here:
        task_id = TaskId(new_id())
        await here.client.cancel("slow", task_id)
        await here.events.wait(Step.CANCEL, count=2)
        here.gates.opened.set()
        assert await here.outcome(here.client, "echo", "secret", task_id) == Ok("secret")


@pytest.mark.parametrize("logins", [LISTED, {}], ids=["listed", "any login"])
async def test_a_malformed_request_ends_nobodys_call(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str], logins: dict[str, Any]
) -> None:
    """It carries the ids of a call of `echo`, and asks for the refusal to be sent to `echo`."""
    async with scene(own_rabbit, postgres_url, mallorys_login[1], peer_logins=logins) as here:
        waiting = await here.client.send("echo", "secret")
        await here.gates.reached.wait()
        (dispatched,) = [event for event in here.events.all if event.step is Step.SEGMENT and event.agent == SLOW]
        (asked,) = [event for event in here.events.all if event.step is Step.SEGMENT and event.agent == ECHO][:1]
        bad = replace(
            here.mallory.request("other", dispatched.task_ids[0]),
            body=b"?",
            reply_to=responses_of(ECHO),
            headers={Header.PARENT_TASK.value: asked.task_ids[0]},
        )
        await here.publish(requests_of(SLOW), bad)
        await here.publish(requests_of(SLOW), replace(bad, app_id="echo"))
        await here.events.wait(Step.DEAD_LETTER, count=2 if logins else 3)
        here.gates.opened.set()
        assert (await waiting).outcome == Ok("secret")


async def test_an_operators_login_cancels(
    own_rabbit: RabbitServer, postgres_url: str, mallorys_login: tuple[str, str]
) -> None:
    name, url = mallorys_login
    async with scene(own_rabbit, postgres_url, url, operator_logins=[name]) as here:
        task_id = TaskId(new_id())
        waiting = await here.client.send("echo", "secret", task_id=task_id, timeout=timedelta(minutes=5))
        await here.gates.reached.wait()
        await here.mallory.cancel("echo", task_id)
        outcome = (await waiting).outcome
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.CANCELLED
        here.gates.opened.set()
