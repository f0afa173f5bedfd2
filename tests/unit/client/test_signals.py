"""`task.signal`, `ctx.receive`, `ctx.set_value` and `task.value`, from a program."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from meshpoint import (
    ConfigurationError,
    InvalidInput,
    InvalidOption,
    InvalidOutput,
    OtherRequester,
    Replies,
    Signal,
    SignalNotKept,
    SignalRefused,
    StatefulAgent,
    TaskExecutionContext,
    TaskFailed,
    TaskHandle,
    TaskNotFound,
    agent,
    connect,
)
from meshpoint.client import status_query
from meshpoint.local import local_mesh
from meshpoint.model.calls import Done, Paused
from meshpoint.model.mailbox import MAX_SIGNAL_BYTES, MAX_VALUE_BYTES
from meshpoint.testing import MeshIdle, TestMesh

from .calling import give_up_after_reply


class Line(BaseModel):
    text: str


chat = Signal("chat", Line)
stop = Signal("stop", bool)


@agent("chatting")
async def chatting(ctx: TaskExecutionContext, count: int) -> str:
    lines: list[str] = []
    for number in range(count):
        await ctx.set_value("received", number)
        lines.append((await ctx.receive(chat)).text)
    return " ".join(lines)


async def say(task: TaskHandle[Any], *words: str) -> None:
    for word in words:
        await task.signal(chat, Line(text=word))


async def test_a_task_receives_its_signals_in_order() -> None:
    async with local_mesh(chatting) as mesh:
        task = await mesh.send(chatting, 5)
        await say(task, *"abcde")
        assert await task.result() == "a b c d e"


async def test_a_signal_with_a_repeated_id_is_received_once() -> None:
    async with local_mesh(chatting) as mesh:
        task = await mesh.send(chatting, 2)
        for _ in range(3):
            await task.signal(chat, Line(text="a"), signal_id="1")
        with pytest.raises(SignalRefused, match="signal id '1' was used for another value"):
            await task.signal(chat, Line(text="b"), signal_id="1")
        await task.signal(chat, Line(text="b"), signal_id="2")
        assert await task.result() == "a b"


async def test_a_signal_to_the_first_segment_is_kept() -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    @agent("slow")
    async def slow(ctx: TaskExecutionContext, _: int) -> str:
        begun.set()
        await released.wait()
        return (await ctx.receive(chat)).text

    async with local_mesh(slow) as mesh:
        task = await mesh.send(slow, 1)
        await begun.wait()
        await say(task, "early")
        released.set()
        assert await task.result() == "early"


async def test_a_late_signal_is_refused() -> None:
    async with local_mesh(chatting, failing) as mesh:
        task = await mesh.send(chatting, 1)
        await say(task, "a")
        await task.result()
        with pytest.raises(SignalRefused, match=r"has already ended \(completed\)"):
            await say(task, "b")
        failed = await mesh.send(failing, 1)
        with pytest.raises(TaskFailed):
            await failed.result()
        with pytest.raises(SignalRefused, match=r"has already ended \(failed\)"):
            await say(failed, "b")


@agent("failing")
async def failing(ctx: TaskExecutionContext, _: int) -> str:
    raise ValueError("broken")


async def test_a_signal_to_an_unknown_task_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_after_reply(monkeypatch)
    monkeypatch.setattr(status_query, "_UNKNOWN_DELAYS", (0.0,))
    async with local_mesh(chatting) as mesh:
        task = mesh.task(chatting, "unknown")
        with pytest.raises(SignalNotKept, match="no replica is running it, and it has no row"):
            await say(task, "a")
        with pytest.raises(TaskNotFound):
            await task.value("received", int)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_value_of_another_requester_names_the_requester(
    tmp_path: Path, durable: bool
) -> None:
    """As the status and the outcome of its task do."""
    begun, released, stored = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @agent("slow")
    async def slow(ctx: TaskExecutionContext, _: int) -> str:
        begun.set()
        await released.wait()
        await ctx.set_value("received", 0)
        stored.set()
        return (await ctx.receive(chat)).text

    url = f"sqlite:///{tmp_path}/mesh.db"
    options: dict[str, Any] = {} if durable else {"stateless_checkpointing": False}
    async with local_mesh(slow, broker_url=url, namespace="demo", **options) as mesh:
        task = await mesh.send(slow, 1)
        await begun.wait()
        async with connect(url, namespace="demo", name="mallory") as stranger:
            theirs = stranger.task(slow, task.id)
            for read in (theirs.value("received", int), theirs.status(), theirs.result()):
                with pytest.raises(OtherRequester, match="belongs to 'client', this client is"):
                    await read
            released.set()
            await stored.wait()
            with pytest.raises(OtherRequester, match="belongs to 'client', this client is"):
                await theirs.value("received", int)
        await say(task, "a")
        assert await task.result() == "a"


async def test_wrong_signals_are_refused_at_once() -> None:
    wrong: Signal[Any] = Signal("chat", int)
    async with local_mesh(chatting) as mesh:
        task = mesh.task(chatting, "any")
        with pytest.raises(InvalidInput, match="signal 'chat'"):
            await task.signal(wrong, "text")
        with pytest.raises(InvalidInput, match="is the maximum"):
            await task.signal(chat, Line(text="x" * MAX_SIGNAL_BYTES))
        with pytest.raises(InvalidOption, match="signal_id"):
            await task.signal(chat, Line(text="a"), signal_id="x" * 249)
        with pytest.raises(InvalidOption, match="key"):
            await task.value("", int)
        no_signal: Any = "chat"
        with pytest.raises(InvalidOption, match="signal needs a Signal, not str"):
            await task.signal(no_signal, "a")
        with pytest.raises(InvalidOption, match="complete needs a Question, not str"):
            await task.complete(no_signal, "a")
    with pytest.raises(ConfigurationError, match="is not a valid signal name"):
        Signal("a b", int)
    no_name: Any = 5
    with pytest.raises(ConfigurationError, match="5 is not a valid signal name"):
        Signal(no_name, int)


async def test_a_signal_of_another_type_fails_the_wait() -> None:
    """The declared types of sender and agent may differ."""
    other: Signal[Any] = Signal("chat", int)
    async with local_mesh(chatting) as mesh:
        task = await mesh.send(chatting, 1)
        await task.signal(other, 7)
        with pytest.raises(TaskFailed, match="signal 'chat': invalid: Line: "):
            await task.result()


async def test_a_value_is_read_while_the_task_waits_and_after_its_end() -> None:
    async with local_mesh(chatting) as mesh:
        task = await mesh.send(chatting, 2)
        await say(task, "a")
        while await task.value("received", int) != 1:  # until the next segment has begun
            pass
        assert await task.value("other", int) is None
        with pytest.raises(InvalidOutput, match="value 'received'"):
            await task.value("received", list[int])
        await say(task, "b")
        await task.result()
        assert await task.value("received", int) == 1


async def test_a_task_that_sets_nothing_has_no_values() -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    @agent("silent")
    async def silent(ctx: TaskExecutionContext, _: int) -> None:
        begun.set()
        await released.wait()

    async with local_mesh(silent) as mesh:
        task = await mesh.send(silent, 1)
        await begun.wait()
        assert await task.value("any", int) is None
        released.set()
        await task.result()


class Chat(StatefulAgent[int, int, str]):
    name = "class-chat"

    async def on_request(self, ctx: TaskExecutionContext, request: int, /) -> Paused | Done[str]:
        waits = {"line": ctx.receive(chat), "again": ctx.receive(chat)}
        return self.ask(request, waits, then=self.on_lines)

    async def on_lines(
        self, ctx: TaskExecutionContext, state: int, replies: Replies
    ) -> Paused | Done[str]:
        await ctx.set_value("lines", [str(replies[key]) for key in replies])
        return self.done(f"{replies.value('line', chat).text} {replies.value('again', chat).text}")


async def test_a_class_agent_receives_signals() -> None:
    agent_ = Chat()
    async with local_mesh(agent_) as mesh:
        task = await mesh.send(agent_, 1)
        await say(task, "a", "b")
        assert await task.result() == "a b"


@agent("racing")
async def racing(ctx: TaskExecutionContext, _: int) -> str:
    said: list[str] = []
    while True:
        line = await ctx.first(ctx.receive(chat), ctx.receive(stop))
        if isinstance(line, bool):
            return " ".join(said)
        said.append(line.text)


async def test_signals_race_each_other() -> None:
    async with TestMesh(racing, always_replay=True) as mesh:
        task = await mesh.send(racing, 1)
        await say(task, "a", "b")
        await task.signal(stop, True)
        assert await task.result() == "a b"


@agent("patient")
async def patient(ctx: TaskExecutionContext, _: int) -> str:
    try:
        return (await ctx.receive(chat, timeout=timedelta(days=1))).text
    except TimeoutError as error:
        return str(error)


async def test_a_wait_for_a_signal_ends_in_virtual_time() -> None:
    async with TestMesh(patient) as mesh:
        assert await mesh.call(patient, 1) == "no signal 'chat' arrived in time"
        task = await mesh.send(patient, 1)
        await mesh.advance(timedelta(hours=23))
        await say(task, "in time")
        assert await task.result() == "in time"


async def test_an_awaited_signal_is_named() -> None:
    async with TestMesh(chatting) as mesh:
        with pytest.raises(MeshIdle) as error:
            await mesh.call(chatting, 1)
        assert str(error.value) == "idle: 'chatting' waits for signal 'chat': signal it"


@pytest.mark.parametrize("point", ["checkpoint", "signal", "record", "resume", "segment"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_crash_loses_or_repeats_a_signal(point: Any, when: str) -> None:
    async with TestMesh(chatting) as mesh:
        task = await mesh.send(chatting, 3)
        await mesh.advance(0)
        mesh.crash(**{when: point})
        await say(task, *"abc")
        assert await task.result() == "a b c"
        assert await task.value("received", int) == 2


@agent("boasting")
async def boasting(ctx: TaskExecutionContext, values: dict[str, Any]) -> None:
    for key, value in values.items():
        await ctx.set_value(key, value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"a": "x" * MAX_VALUE_BYTES}, "is the maximum"),
        ({"": 1}, "is not printable"),
        ({f"key {number}": 1 for number in range(101)}, "exceeds the limit of 100 keys"),
    ],
)
async def test_wrong_values_fail_the_task(values: dict[str, Any], problem: str) -> None:
    async with TestMesh(boasting) as mesh:
        with pytest.raises(TaskFailed, match=problem):
            await mesh.call(boasting, values)


async def test_a_value_that_is_not_json_fails_the_task() -> None:
    loop: list[Any] = []
    loop.append(loop)
    odd_values = [object(), b"\xff", {"\ud800": 1}, loop, itertools.count()]

    @agent("odd")
    async def odd(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.set_value("odd", odd_values[number])

    async with TestMesh(odd) as mesh:
        for number in range(len(odd_values)):
            with pytest.raises(TaskFailed, match="set_value: "):
                await mesh.call(odd, number)
