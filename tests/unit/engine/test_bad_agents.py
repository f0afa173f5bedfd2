"""Agents that break their contract: each task has one outcome, and the replica keeps serving."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.errors import AgentFailed, IncompatibleState, InvalidInput, InvalidOutput
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Scripted, doubler
from .mesh import Mesh
from .puppet import Puppet


class Nothing(BaseException):
    """Not an `Exception`."""


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def code(*_: Any) -> Any:
        raise error

    return code


def returning(value: Any) -> Callable[..., Awaitable[Any]]:
    async def code(*_: Any) -> Any:
        return value

    return code


def pausing_on(input_: Any, peer: str = "peer") -> Callable[..., Awaitable[Any]]:
    return returning(Paused([Call("call", peer, input_)], b"state"))


def producing(*artifacts: Any) -> Callable[..., Awaitable[Any]]:
    async def code(ctx: Any, *_: Any) -> Any:
        ctx.produced_artifacts.extend(artifacts)
        return Done(1)

    return code


async def cancels_itself(*_: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def swallows_a_group(*_: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        raise SystemExit(3)


class Silent(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


class Odd(Exception, metaclass=Nameless):
    """An exception whose type name cannot be read."""


class Trap:
    """A result that raises on any access."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise SystemExit(5)


class Endless:
    """An endless iterator of artifacts."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return {}


def in_background(error: BaseException) -> Callable[..., Awaitable[Any]]:
    """Starts a background task that raises, and waits for something else."""

    async def background() -> None:
        raise error

    async def code(*_: Any) -> Any:
        left = asyncio.create_task(background())
        await asyncio.Event().wait()
        del left

    return code


def in_a_child(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def child() -> None:
        raise error

    async def code(*_: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(asyncio.sleep(3600))

    return code


def gathered(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def child() -> None:
        raise error

    async def code(*_: Any) -> Any:
        await asyncio.gather(child(), asyncio.sleep(0), return_exceptions=True)
        return Done("none the wiser")

    return code


def in_a_thread(error: BaseException) -> Callable[..., Awaitable[Any]]:
    def blocking() -> None:
        raise error

    async def code(*_: Any) -> Any:
        await asyncio.to_thread(blocking)

    return code


def in_a_task_of_a_thread(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def back_on_the_loop() -> None:
        raise error

    async def code(*_: Any) -> Any:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(back_on_the_loop(), loop))
        await asyncio.Event().wait()

    return code


def in_a_finalizer(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def code(*_: Any) -> Any:
        try:
            raise ValueError("first")
        finally:
            raise error

    return code


def when_closing(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def numbers() -> Any:
        try:
            yield 1
        finally:
            raise error

    async def code(*_: Any) -> Any:
        generator = numbers()
        await anext(generator)
        await generator.aclose()

    return code


def not_even_a_coroutine(error: BaseException) -> Callable[..., Awaitable[Any]]:
    def code(*_: Any) -> Any:
        raise error

    return code


async def causes_itself(*_: Any) -> Any:
    error = ValueError("a circle")
    error.__cause__ = error
    raise error


async def nests(*_: Any) -> Any:
    error: BaseException = ValueError("deep")
    for _each in range(5000):
        error = BaseExceptionGroup("group", [error])
    raise error


EXITS = {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt("by code")}
WAYS = [in_background, in_a_child, gathered, in_a_thread, in_a_task_of_a_thread, in_a_finalizer, when_closing]
WAYS += [not_even_a_coroutine]
EXITING = {
    f"{name} {way.__name__.replace('_', ' ')}": (way(error), f"{name}: ")
    for way in WAYS
    for name, error in EXITS.items()
}

endless: dict[str, Any] = {}
endless["self"] = endless

BROKEN: dict[str, tuple[Callable[..., Awaitable[Any]], str]] = {
    "raises": (raising(ValueError("no such city")), "ValueError: no such city"),
    "raises AgentFailed": (raising(AgentFailed("in my own words")), "in my own words"),
    "raises InvalidOutput": (raising(InvalidOutput("does not fit")), "does not fit"),
    "raises SystemExit": (raising(SystemExit(3)), "SystemExit: 3"),
    "raises SystemExit beside others": (swallows_a_group, "SystemExit: 3"),
    "raises another BaseException": (raising(Nothing("at all")), "Nothing: at all"),
    "raises CancelledError": (raising(asyncio.CancelledError()), "cancelled itself"),
    "cancels itself": (cancels_itself, "cancelled itself"),
    "raises StopIteration": (raising(StopAsyncIteration()), "StopAsyncIteration"),
    "returns None": (returning(None), "NoneType"),
    "returns a value": (returning({"city": "Oslo"}), "dict"),
    "returns an object": (returning(Done(object())), "not JSON"),
    "returns bytes": (returning(Done(b"\xff")), "not JSON"),
    "returns not-a-number": (returning(Done([float("nan")])), "not JSON"),
    "returns infinity": (returning(Done({"weight": float("inf")})), "not JSON"),
    "returns half a character": (returning(Done("\ud800")), "not JSON"),
    "returns itself": (returning(Done(endless)), "not JSON"),
    "returns numbers without an end": (
        returning(Done(itertools.count())),
        "not JSON: count: an iterator of more than",
    ),
    "returns rows without an end": (
        returning(Done({"rows": [itertools.repeat("row")]})),
        "not JSON: repeat: an iterator",
    ),
    "returns an artifact without an end": (
        returning(Done(1, ({"rows": itertools.count()},))),
        "an iterator of more than",
    ),
    "returns artifacts of no use": (returning(Done(1, ({"it": object()},))), "artifacts"),
    "returns artifacts that are no objects": (returning(Done(1, (7,))), "artifacts"),  # type: ignore[arg-type]
    "keeps artifacts that are no objects": (
        producing({}, "a text"),
        "the agent's artifacts are not JSON objects: ctx.produced_artifacts[1] is a str",
    ),
    "returns too much": (returning(Done("x" * 5000)), "max_message_bytes"),
    "asks with an object": (pausing_on(object()), "JSON"),
    "raises KeyboardInterrupt": (raising(KeyboardInterrupt("by code")), "KeyboardInterrupt: by code"),
    "raises GeneratorExit": (raising(GeneratorExit("by code")), "GeneratorExit: by code"),
    "raises GeneratorExit at once": (not_even_a_coroutine(GeneratorExit("at once")), "GeneratorExit: at once"),
    "raises GeneratorExit in a child": (in_a_child(GeneratorExit()), "BaseExceptionGroup"),
    "raises SystemExit in a group": (raising(BaseExceptionGroup("of", [SystemExit(3)])), "BaseExceptionGroup: of"),
    "raises without a text": (raising(Silent()), "cannot be read"),
    "raises without a name": (raising(Odd("still a text")), "still a text"),
    "raises a text of half a character": (raising(ValueError("\ud800")), "ValueError: "),
    "raises a text with a zero": (raising(ValueError("a\0b")), "ValueError: a"),
    "raises AgentFailed without a text": (raising(type("Mute", (AgentFailed, Silent), {})()), ""),
    "raises in a circle": (causes_itself, "a circle"),
    "raises a deep group": (nests, "ExceptionGroup: group"),
    "returns a trap": (returning(Trap()), ""),
    "returns a trap as its result": (returning(Done(Trap())), ""),
    "returns artifacts without an end": (returning(Done(1, Endless())), "artifacts"),  # type: ignore[arg-type]
    "returns no awaitable": (lambda *_: 5, "TypeError"),  # type: ignore[dict-item, return-value]
    "pauses on a trap": (pausing_on(Trap()), ""),
    **EXITING,
}


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("code", "words"), BROKEN.values(), ids=BROKEN)
async def test_in_the_first_segment(
    mesh: Mesh, boss: Puppet, peer: Puppet, code: Callable[..., Awaitable[Any]], words: str, durable: bool
) -> None:
    await mesh.replica(Scripted("broken", code), max_message_bytes=4000, max_concurrency=1, durable=durable)
    for _ in range(2):  # the second request needs the slot of the first
        reply = await boss.reply(await boss.ask("broken", 1))
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.ERROR
        assert words in reply.message
    await mesh.settle()
    assert mesh.unacked("broken") == 0
    assert mesh.dead_letters("broken") == []


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("code", "words"), BROKEN.values(), ids=BROKEN)
async def test_in_the_second_segment(
    mesh: Mesh, boss: Puppet, peer: Puppet, code: Callable[..., Awaitable[Any]], words: str, durable: bool
) -> None:
    broken = Scripted("broken", pausing_on(1), code)
    await mesh.replica(broken, max_message_bytes=4000, max_concurrency=1, durable=durable)
    for count in (1, 2):
        task_id = await boss.ask("broken", 1)
        await peer.respond(await peer.request_number(count), 1)
        reply = await boss.reply(task_id)
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.ERROR
        assert words in reply.message
        assert await mesh.state(task_id) is (TaskState.FAILED if durable else None)
    await mesh.settle()
    assert mesh.unacked("broken") == 0


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("peer_name", ["no such agent", "a/b", ""])
async def test_a_peer_that_cannot_be(mesh: Mesh, boss: Puppet, durable: bool, peer_name: str) -> None:
    async def resume(ctx: Any, state: Any, outcomes: Any) -> Any:
        return Done(outcomes["call"].kind.value)

    await mesh.replica(Scripted("broken", pausing_on(1, peer_name), resume), durable=durable)
    assert await boss.reply(await boss.ask("broken", 1)) == Ok("undeliverable")


async def test_a_state_that_cannot_be_read_goes_to_another_replica(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    old = Scripted("moody", pausing_on(1), raising(IncompatibleState("written by a later release")))
    await mesh.replica(old, incompatible_pause=timedelta(seconds=4.5))
    task_id = await boss.ask("moody", 1)
    await peer.respond(await peer.request_number(), 1)
    await mesh.events.wait(Step.RELEASE)
    await mesh.settle()
    assert await mesh.state(task_id) is TaskState.READY
    # short enough that this replica sweeps first once the pause is over
    often = timedelta(seconds=0.2)
    await mesh.replica(Scripted("moody", pausing_on(1), returning(Done("read"))), sweep_interval=often)
    await mesh.advance(4)
    assert boss.replies() == []  # the pause after the incompatible state is not over yet
    for _ in range(9):
        mesh.clock.advance(timedelta(seconds=0.1))
        await mesh.settle()
    assert boss.replies(task_id) == [Ok("read")]


async def test_a_state_that_nobody_can_read_is_parked_for_a_person(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    moody = Scripted("moody", pausing_on(1), raising(IncompatibleState("unreadable")))
    await mesh.replica(moody, incompatible_pause=timedelta(minutes=10))
    task_id = await boss.ask("moody", 1)
    await peer.respond(await peer.request_number(), 1)
    await mesh.events.wait(Step.RELEASE)
    for _ in range(59):
        mesh.clock.advance(timedelta(minutes=1))
        await mesh.settle()
    assert await mesh.state(task_id) is TaskState.READY
    for _ in range(12):
        mesh.clock.advance(timedelta(minutes=1))
        await mesh.settle()
    assert await mesh.state(task_id) is TaskState.PARKED
    (parked,) = mesh.events.of(Step.PARKED)
    assert parked.task_ids == (task_id,)
    assert boss.replies() == []
    releases = len(mesh.events.of(Step.RELEASE))
    for _ in range(30):
        mesh.clock.advance(timedelta(minutes=1))
        await mesh.settle()
    assert len(mesh.events.of(Step.RELEASE)) == releases
    await boss.cancel("moody", task_id)  # a parked task can still be cancelled
    assert (await boss.reply(task_id)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]


async def test_a_replica_takes_only_formats_it_declares(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    new = Scripted("agent", pausing_on(1), returning(Done("new")), state_format="agent/2")
    old = Scripted("agent", pausing_on(1), returning(Done("old")), state_format="agent/1")
    first = await mesh.replica(new)
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    await first.crash()
    await mesh.replica(old)
    await peer.respond(request, 1)
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.READY
    assert boss.replies() == []
    await mesh.replica(new)
    await mesh.advance(1)
    assert boss.replies(task_id) == [Ok("new")]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("begin_at_delivery", [1, 3])
async def test_a_new_task_has_no_state_to_be_incompatible_with(
    mesh: Mesh, boss: Puppet, durable: bool, begin_at_delivery: int
) -> None:
    moody = Scripted("moody", raising(IncompatibleState("what state?")))
    await mesh.replica(moody, durable=durable, begin_at_delivery=begin_at_delivery)
    reply = await boss.reply(await boss.ask("moody", 1))
    assert isinstance(reply, Failed)
    assert "what state?" in reply.message
    assert mesh.unacked("moody") == 0


async def test_in_memory_nobody_else_can_read_a_state_either(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(Scripted("moody", pausing_on(1), raising(IncompatibleState("unreadable"))), durable=False)
    task_id = await boss.ask("moody", 1)
    await peer.respond(await peer.request_number(), 1)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert "unreadable" in reply.message
    await mesh.settle()
    assert mesh.unacked("moody") == 0


LONG = 100_000


@pytest.mark.parametrize("error", [ValueError("x" * LONG), AgentFailed("x" * LONG), InvalidInput("x" * LONG)])
async def test_a_long_text_is_cut(
    mesh: Mesh, boss: Puppet, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.replica(Scripted("broken", raising(error)))
    reply = await boss.reply(await boss.ask("broken", 1))
    assert isinstance(reply, Failed)
    assert 9_000 < len(reply.message) < 11_000
    assert "characters left out" in reply.message
    assert max((len(record.getMessage()) for record in caplog.records), default=0) < 20_000


@pytest.mark.parametrize("stopping", [AgentFailed("interrupted"), SystemExit(1), KeyboardInterrupt()])
async def test_a_clean_up_that_fails_when_its_replica_drains_fails_no_task(
    mesh: Mesh, boss: Puppet, stopping: BaseException
) -> None:
    reached = asyncio.Event()

    async def code(*_: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise stopping

    first = await mesh.replica(Scripted("agent", code), drain_timeout=timedelta())
    task_id = await boss.ask("agent", 1)
    await reached.wait()
    await first.drain()
    assert boss.replies() == []
    await mesh.replica(Scripted("agent", returning(Done("elsewhere"))))
    assert await boss.reply(task_id) == Ok("elsewhere")


async def test_a_background_task_left_behind_fails_for_itself(mesh: Mesh, boss: Puppet) -> None:
    ended, exit_now = asyncio.Event(), asyncio.Event()

    async def background() -> None:
        await exit_now.wait()
        ended.set()
        raise SystemExit(3)

    left: list[asyncio.Task[None]] = []

    async def code(*_: Any) -> Any:
        left.append(asyncio.create_task(background()))
        return Done("without it")

    await mesh.replica(Scripted("agent", code), doubler)
    assert await boss.reply(await boss.ask("agent", 1)) == Ok("without it")
    exit_now.set()
    await ended.wait()
    assert await boss.reply(await boss.ask("doubler", 2)) == Ok(4)


async def test_the_tasks_of_others_on_the_loop_are_left_alone(mesh: Mesh) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    replica = await mesh.replica(doubler)
    coroutine = asyncio.sleep(0)
    task = asyncio.create_task(coroutine)
    assert task.get_coro() is coroutine
    await task
    await replica.drain()
    assert loop.get_task_factory() is before


async def test_one_broken_task_does_not_disturb_another(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(Scripted("broken", raising(SystemExit(1))), doubler)
    broken = [await boss.ask("broken", number) for number in range(20)]
    fine = [await boss.ask("doubler", number) for number in range(20)]
    assert [await boss.reply(task_id) for task_id in fine] == [Ok(2 * number) for number in range(20)]
    for task_id in broken:
        assert isinstance(await boss.reply(task_id), Failed)


@pytest.mark.parametrize("kind", [RuntimeError, AgentFailed, InvalidInput])
async def test_a_secret_in_an_error_stays_with_its_task(
    mesh: Mesh, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    secret, own = "sk-abcdefghijklmnopqrstuvwx", "0123-4567"
    error = kind(f"login failed: password={secret} badge: {own}")
    await mesh.replica(Scripted("agent", raising(error)), secret_keys=("badge",))
    outcome = await mesh.ask("agent", 1)
    assert isinstance(outcome, Failed)
    assert "login failed" in outcome.message
    for text in (outcome.message, caplog.text):
        assert secret not in text
        assert own not in text
