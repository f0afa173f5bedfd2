"""Agents that break their contract: each task has one outcome, and the replica keeps serving."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from fake_peer import FakePeer
from meshpoint.errors import AgentFailed, IncompatibleState, InvalidInput, InvalidOutput
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import ScriptedAgent, doubler
from .mesh import Mesh


class BareException(BaseException):
    """Not an `Exception`."""


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def run(*_: Any) -> Any:
        raise error

    return run


def returning(value: Any) -> Callable[..., Awaitable[Any]]:
    async def run(*_: Any) -> Any:
        return value

    return run


def pausing_on(input_: Any, peer: str = "peer") -> Callable[..., Awaitable[Any]]:
    return returning(Paused([Call("call", peer, input_)], b"state"))


def producing(*artifacts: Any) -> Callable[..., Awaitable[Any]]:
    async def code(ctx: Any, *_: Any) -> Any:
        ctx.produced_artifacts.extend(artifacts)
        return Done(1)

    return code


async def cancels_itself(*_: Any) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


async def swallows_a_group(*_: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        raise SystemExit(3)


class SilentError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class NamelessMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]  # wrong on purpose
        raise KeyboardInterrupt


class UnusualError(Exception, metaclass=NamelessMeta):
    """An exception whose type name cannot be read."""


class TrapError:
    """A result that raises on any access."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise SystemExit(5)


class EndlessIterator:
    """An endless iterator of artifacts."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return {}


def in_background_task(error: BaseException) -> Callable[..., Awaitable[Any]]:
    """Starts a background task that raises, and waits for something else."""

    async def background() -> None:
        raise error

    async def code(*_: Any) -> Any:
        leftover = asyncio.create_task(background())
        await asyncio.Event().wait()
        del leftover

    return code


def in_child_task(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def child() -> None:
        raise error

    async def code(*_: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(asyncio.sleep(3600))

    return code


def in_gather(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def child() -> None:
        raise error

    async def code(*_: Any) -> Any:
        await asyncio.gather(child(), asyncio.sleep(0), return_exceptions=True)
        return Done("none the wiser")

    return code


def in_thread(error: BaseException) -> Callable[..., Awaitable[Any]]:
    def blocking() -> None:
        raise error

    async def code(*_: Any) -> Any:
        await asyncio.to_thread(blocking)

    return code


def in_task_of_thread(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def raise_on_loop() -> None:
        raise error

    async def code(*_: Any) -> Any:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(raise_on_loop(), loop))
        await asyncio.Event().wait()

    return code


def in_finalizer(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def code(*_: Any) -> Any:
        try:
            raise ValueError("first")
        finally:
            raise error

    return code


def in_generator_close(error: BaseException) -> Callable[..., Awaitable[Any]]:
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


def not_a_coroutine(error: BaseException) -> Callable[..., Awaitable[Any]]:
    def code(*_: Any) -> Any:
        raise error

    return code


async def self_caused_error(*_: Any) -> Any:
    error = ValueError("a circle")
    error.__cause__ = error
    raise error


async def nested_errors(*_: Any) -> Any:
    error: BaseException = ValueError("deep")
    for _each in range(5000):
        error = BaseExceptionGroup("group", [error])
    raise error


EXITS = {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt("by code")}
EXIT_KINDS = [
    in_background_task,
    in_child_task,
    in_gather,
    in_thread,
    in_task_of_thread,
    in_finalizer,
    in_generator_close,
]
EXIT_KINDS += [not_a_coroutine]
EXITING_AGENTS = {
    f"{name} {exit_kind.__name__.replace('_', ' ')}": (exit_kind(error), f"{name}: ")
    for exit_kind in EXIT_KINDS
    for name, error in EXITS.items()
}

endless: dict[str, Any] = {}
endless["self"] = endless

BROKEN_AGENTS: dict[str, tuple[Callable[..., Awaitable[Any]], str]] = {
    "raises": (raising(ValueError("no such city")), "ValueError: no such city"),
    "raises AgentFailed": (raising(AgentFailed("in my own words")), "in my own words"),
    "raises InvalidOutput": (raising(InvalidOutput("does not fit")), "does not fit"),
    "raises SystemExit": (raising(SystemExit(3)), "SystemExit: 3"),
    "raises SystemExit among others": (swallows_a_group, "SystemExit: 3"),
    "raises another BaseException": (raising(BareException("at all")), "BareException: at all"),
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
        returning(Done(1, cast(Any, ({"rows": itertools.count()},)))),
        "an iterator of more than",
    ),
    "returns artifacts of no use": (
        returning(Done(1, cast(Any, ({"it": object()},)))),
        "artifacts",
    ),
    "returns artifacts that are no objects": (returning(Done(1, (7,))), "artifacts"),  # type: ignore[arg-type]  # wrong on purpose
    "keeps artifacts that are no objects": (
        producing({}, "a text"),
        "the agent's artifacts are not JSON objects: ctx.produced_artifacts[1] is a str",
    ),
    "returns too much": (returning(Done("x" * 5000)), "max_message_bytes"),
    "asks with an object": (pausing_on(object()), "JSON"),
    "raises KeyboardInterrupt": (
        raising(KeyboardInterrupt("by code")),
        "KeyboardInterrupt: by code",
    ),
    "raises GeneratorExit": (raising(GeneratorExit("by code")), "GeneratorExit: by code"),
    "raises GeneratorExit at once": (
        not_a_coroutine(GeneratorExit("at once")),
        "GeneratorExit: at once",
    ),
    "raises GeneratorExit in a child": (in_child_task(GeneratorExit()), "GeneratorExit: "),
    "raises SystemExit in a group": (
        raising(BaseExceptionGroup("of", [SystemExit(3)])),
        "BaseExceptionGroup: of",
    ),
    "raises without a text": (raising(SilentError()), "cannot be read"),
    "raises without a name": (raising(UnusualError("still a text")), "still a text"),
    "raises a text of half a character": (raising(ValueError("\ud800")), "ValueError: "),
    "raises a text with a zero": (raising(ValueError("a\0b")), "ValueError: a"),
    "raises AgentFailed without a text": (
        raising(type("Mute", (AgentFailed, SilentError), {})()),
        "",
    ),
    "raises in a circle": (self_caused_error, "a circle"),
    "raises a deep group": (nested_errors, "ExceptionGroup: group"),
    "returns a trap": (returning(TrapError()), ""),
    "returns a trap as its result": (returning(Done(TrapError())), ""),
    "returns artifacts without an end": (returning(Done(1, EndlessIterator())), "artifacts"),  # type: ignore[arg-type]  # wrong on purpose
    "returns no awaitable": (lambda *_: 5, "TypeError"),  # type: ignore[dict-item]  # a bad agent
    "pauses on a trap": (pausing_on(TrapError()), ""),
    **EXITING_AGENTS,
}


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("code", "words"), BROKEN_AGENTS.values(), ids=BROKEN_AGENTS)
async def test_a_misbehaving_first_segment_fails_only_its_task(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    code: Callable[..., Awaitable[Any]],
    words: str,
    durable: bool,
) -> None:
    await mesh.replica(
        ScriptedAgent("broken", code), max_message_bytes=4000, max_concurrency=1, durable=durable
    )
    for _ in range(2):  # the second request needs the slot of the first
        reply = await client.reply(await client.ask("broken", 1))
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.ERROR
        assert words in reply.message
    await mesh.idle()
    assert mesh.unacked("broken") == 0
    assert mesh.dead_letters("broken") == []


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("code", "words"), BROKEN_AGENTS.values(), ids=BROKEN_AGENTS)
async def test_a_misbehaving_second_segment_fails_only_its_task(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    code: Callable[..., Awaitable[Any]],
    words: str,
    durable: bool,
) -> None:
    broken = ScriptedAgent("broken", pausing_on(1), code)
    await mesh.replica(broken, max_message_bytes=4000, max_concurrency=1, durable=durable)
    for count in (1, 2):
        task_id = await client.ask("broken", 1)
        await peer.respond(await peer.wait_for_request(count), 1)
        reply = await client.reply(task_id)
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.ERROR
        assert words in reply.message
        assert await mesh.state(task_id) is (TaskState.FAILED if durable else None)
    await mesh.idle()
    assert mesh.unacked("broken") == 0


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("peer_name", ["no such agent", "a/b", ""])
async def test_an_invalid_peer_name_is_refused(
    mesh: Mesh, client: FakePeer, durable: bool, peer_name: str
) -> None:
    async def resume(ctx: Any, state: Any, outcomes: Any) -> Any:
        return Done(outcomes["call"].kind.value)

    await mesh.replica(ScriptedAgent("broken", pausing_on(1, peer_name), resume), durable=durable)
    assert await client.reply(await client.ask("broken", 1)) == Ok("undeliverable")


async def test_a_state_that_cannot_be_read_goes_to_another_replica(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    old = ScriptedAgent(
        "moody", pausing_on(1), raising(IncompatibleState("written by a later release"))
    )
    await mesh.replica(old, app_version="1")
    task_id = await client.ask("moody", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.events.wait(Step.PARKED)
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.PARKED
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 2, "it is not tried again"
    new = ScriptedAgent("moody", pausing_on(1), returning(Done("read")))
    await mesh.replica(new, app_version="2")
    assert await client.reply(task_id) == Ok("read")


async def test_a_parked_task_can_be_cancelled(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    rejecting_agent = ScriptedAgent(
        "moody",
        pausing_on(1),
        raising(IncompatibleState("unreadable; password=hunter2 " + "x" * 5_000)),
    )
    await mesh.replica(rejecting_agent)
    task_id = await client.ask("moody", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    (parked_event,) = await mesh.events.wait(Step.PARKED)
    assert parked_event.task_ids == (task_id,)
    assert "unreadable" in str(parked_event.detail["reason"])
    assert "hunter2" not in str(parked_event.detail["reason"])
    (task, _) = await mesh.task(task_id)
    assert task.parked_reason == parked_event.detail["reason"]
    assert len(task.parked_reason or "") == 2_001
    await mesh.idle()
    assert client.replies() == []
    await client.cancel("moody", task_id)
    assert (await client.reply(task_id)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]  # else the test fails


async def test_a_replica_acquires_only_tasks_in_formats_it_declares(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    new = ScriptedAgent("agent", pausing_on(1), returning(Done("new")), state_format="agent/2")
    old = ScriptedAgent("agent", pausing_on(1), returning(Done("old")), state_format="agent/1")
    first = await mesh.replica(new)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.replica(old)
    await peer.respond(request, 1)
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.READY
    assert client.replies() == []
    await mesh.replica(new)
    await mesh.advance(1)
    assert client.replies(task_id) == [Ok("new")]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("begin_at_delivery", [1, 3])
async def test_a_new_task_that_raises_incompatible_state_fails(
    mesh: Mesh, client: FakePeer, durable: bool, begin_at_delivery: int
) -> None:
    rejecting_agent = ScriptedAgent("moody", raising(IncompatibleState("what state?")))
    await mesh.replica(rejecting_agent, durable=durable, begin_at_delivery=begin_at_delivery)
    reply = await client.reply(await client.ask("moody", 1))
    assert isinstance(reply, Failed)
    assert "what state?" in reply.message
    assert mesh.unacked("moody") == 0


async def test_an_unreadable_in_process_state_fails_its_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(
        ScriptedAgent("moody", pausing_on(1), raising(IncompatibleState("unreadable"))),
        durable=False,
    )
    task_id = await client.ask("moody", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert "unreadable" in reply.message
    await mesh.idle()
    assert mesh.unacked("moody") == 0


LONG_TEXT = 100_000


@pytest.mark.parametrize(
    "error",
    [ValueError("x" * LONG_TEXT), AgentFailed("x" * LONG_TEXT), InvalidInput("x" * LONG_TEXT)],
)
async def test_a_long_error_text_is_truncated(
    mesh: Mesh, client: FakePeer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.replica(ScriptedAgent("broken", raising(error)))
    reply = await client.reply(await client.ask("broken", 1))
    assert isinstance(reply, Failed)
    assert 9_000 < len(reply.message) < 11_000
    assert "characters left out" in reply.message
    assert max((len(record.getMessage()) for record in caplog.records), default=0) < 20_000


@pytest.mark.parametrize(
    "stopping", [AgentFailed("interrupted"), SystemExit(1), KeyboardInterrupt()]
)
async def test_a_failing_cleanup_during_a_drain_fails_no_task(
    mesh: Mesh, client: FakePeer, stopping: BaseException
) -> None:
    reached = asyncio.Event()

    async def code(*_: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise stopping

    first = await mesh.replica(ScriptedAgent("agent", code), drain_timeout=timedelta())
    task_id = await client.ask("agent", 1)
    await reached.wait()
    await first.drain()
    assert client.replies() == []
    await mesh.replica(ScriptedAgent("agent", returning(Done("elsewhere"))))
    assert await client.reply(task_id) == Ok("elsewhere")


async def test_a_leftover_background_task_fails_nothing_else(mesh: Mesh, client: FakePeer) -> None:
    ended, exit_now = asyncio.Event(), asyncio.Event()

    async def background() -> None:
        await exit_now.wait()
        ended.set()
        raise SystemExit(3)

    leftovers: list[asyncio.Task[None]] = []

    async def code(*_: Any) -> Any:
        leftovers.append(asyncio.create_task(background()))
        return Done("without it")

    await mesh.replica(ScriptedAgent("agent", code), doubler)
    assert await client.reply(await client.ask("agent", 1)) == Ok("without it")
    exit_now.set()
    await ended.wait()
    assert await client.reply(await client.ask("doubler", 2)) == Ok(4)


async def test_unrelated_tasks_on_the_loop_are_not_touched(mesh: Mesh) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    replica = await mesh.replica(doubler)
    coroutine = asyncio.sleep(0)
    task = asyncio.create_task(coroutine)
    assert task.get_coro() is coroutine
    await task
    await replica.drain()
    assert loop.get_task_factory() is before


async def test_broken_tasks_do_not_affect_others(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(ScriptedAgent("broken", raising(SystemExit(1))), doubler)
    broken_ids = [await client.ask("broken", number) for number in range(20)]
    healthy_ids = [await client.ask("doubler", number) for number in range(20)]
    assert [await client.reply(task_id) for task_id in healthy_ids] == [
        Ok(2 * number) for number in range(20)
    ]
    for task_id in broken_ids:
        assert isinstance(await client.reply(task_id), Failed)


@pytest.mark.parametrize("kind", [RuntimeError, AgentFailed, InvalidInput])
async def test_a_configured_secret_is_masked_only_in_its_own_task(
    mesh: Mesh, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    secret, own_outcome = "sk-abcdefghijklmnopqrstuvwx", "0123-4567"
    error = kind(f"login failed: password={secret} badge: {own_outcome}")
    await mesh.replica(ScriptedAgent("agent", raising(error)), secret_keys=("badge",))
    outcome = await mesh.ask("agent", 1)
    assert isinstance(outcome, Failed)
    assert "login failed" in outcome.message
    for text in (outcome.message, caplog.text):
        assert secret not in text
        assert own_outcome not in text
