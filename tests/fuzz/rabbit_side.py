"""The fuzzer's connection to RabbitMQ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from servers import RabbitServer

from .amqp import KEEP, Headers, RawConnection, ReceivedMessage, WireMessage, decode_header
from .mesh import AGENTS, OPERATOR
from .recipes import CLOSING, EVE, EVIL, FULL_QUEUE, MALLORY, REPLIES, FuzzState
from .replica import marks_of

_PASSWORD = "mallory"
_ISOLATED_SUFFIX = " single-message"
"""Suffix of the names of connections that try a single suspicious message."""
_ISOLATED_MARK = " isolated "
"""Part of the names of isolated processes' connections.

These processes may be killed, and a busy machine has more of them.
"""
_CONNECTION_NAME = "client-provided name: meshpoint "
_MAX_UNCONFIRMED = 300
_REDELIVERY_SECONDS = 5.0
"""Seconds for the broker to redeliver messages often enough."""


@dataclass(frozen=True)
class Connections:
    """The broker's log lines on connections that stay open and on lost connections.

    `isolated` counts the connections that were opened to try one message.
    """

    opened: list[str] = field(default_factory=list)
    isolated: int = 0
    closed: list[str] = field(default_factory=list)

    def since(self, earlier: Connections) -> Connections:
        """The connections that were added after `earlier`."""
        opened, closed = self.opened[len(earlier.opened) :], self.closed[len(earlier.closed) :]
        return Connections(opened, self.isolated - earlier.isolated, closed)


class RabbitSide:
    """Records all traffic, plays the lying peer, sends messages, and collects dead letters.

    The messages are sent under a separate login.
    """

    def __init__(self, rabbit: RabbitServer, namespace: str, world: FuzzState) -> None:
        self._rabbit, self._namespace, self._world = rabbit, namespace, world
        self._exchange = f"{namespace}.mesh"
        self._stack = AsyncExitStack()
        self._confirm_tasks: dict[asyncio.Task[None], None] = {}
        self._url = rabbit.url.replace("guest:guest", f"{MALLORY}:{_PASSWORD}")
        # queues in use by a group of redelivered messages; one group per queue
        self.redelivering: set[str] = set()
        self.count_by_result: Counter[str] = Counter()
        self.refused: set[str] = set()  # marks of messages refused by the broker
        self.dead: set[str] = set()  # marks among the dead letters
        self.replied: set[str] = set()  # marks in replies to the fuzzer
        # reasons why the broker closed the fuzzer's connection
        self.count_by_close_reason: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for login in (MALLORY, OPERATOR):
            await self._rabbit.add_user(login, _PASSWORD)
        operators = self._rabbit.url.replace("guest:guest", f"{OPERATOR}:{_PASSWORD}")
        self._sender = await self._stack.enter_async_context(RawConnection(self._url))
        self._operator = await self._stack.enter_async_context(RawConnection(operators))
        self._redeliverer = await self._stack.enter_async_context(RawConnection(self._rabbit.url))
        self._listener = await self._stack.enter_async_context(RawConnection(self._rabbit.url))
        await self._listen(self._listener)
        await self._declare_and_consume(self._sender, REPLIES, self._on_reply)
        for name in (EVE, OPERATOR):
            await self._sender.bind(
                f"{self._namespace}.{REPLIES}", self._exchange, f"{name}.replies"
            )
        await self._declare_and_consume(self._sender, f"{EVIL}.req", self._on_call)
        await self._declare_and_consume(self._sender, f"{EVIL}.resp", lambda _: None)
        full: Headers = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await self._declare_and_consume(self._sender, FULL_QUEUE, None, full)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._confirm_tasks):
            task.cancel()
        await self._sender.__aexit__()
        await self._stack.aclose()

    async def send(self, mark: str, recipe: str, message: WireMessage) -> None:
        """Publish; the broker's response is recorded when it arrives."""
        if recipe in CLOSING:
            async with RawConnection(self._url) as connection:
                confirmation = await connection.publish(self._exchange, message)
                self._record_result(mark, await confirmation)
            return
        if self._sender.closed:
            await self._reopen()
        while len(self._confirm_tasks) > _MAX_UNCONFIRMED:
            await asyncio.wait(list(self._confirm_tasks), return_when=asyncio.FIRST_COMPLETED)
        wire = self._operator if message.properties.get("user_id") == OPERATOR else self._sender
        task = asyncio.create_task(
            self._await_confirm(mark, await wire.publish(self._exchange, message))
        )
        self._confirm_tasks[task] = None
        task.add_done_callback(lambda done: self._confirm_tasks.pop(done, None))

    async def redeliver(
        self,
        mark: str,
        recipe: str,
        messages: Sequence[WireMessage],
        times: int,
        then: Callable[[], Awaitable[None]],
    ) -> None:
        """Have the broker redeliver `messages`, published to one request queue, `times` times.

        Replicas receive them after `then`, all at once, as messages that were delivered often.
        """
        key = messages[0].key
        self.redelivering.add(key)
        kept_tags, redelivered, all_redelivered = list[int](), 0, asyncio.Event()

        def receive(received: ReceivedMessage) -> str:
            nonlocal redelivered
            found = decode_header(received.header)
            count = found[1].get("x-delivery-count", 0) if found else 0
            is_own = mark in marks_of(received.header, received.body)
            if (
                is_own
                and not all_redelivered.is_set()
                and isinstance(count, int)
                and count < times
            ):
                self._redeliverer.requeue(received.tag)
                return KEEP
            kept_tags.append(received.tag)
            redelivered += is_own
            if redelivered >= len(messages):
                all_redelivered.set()
            return KEEP

        await self._redeliverer.consume(f"{self._namespace}.{key}", mark, receive, priority=10)
        for message in messages:
            await self.send(mark, recipe, message)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REDELIVERY_SECONDS):
                await all_redelivered.wait()
        await then()
        await self._redeliverer.cancel(mark)
        for tag in kept_tags:
            self._redeliverer.requeue(tag)
        self.redelivering.discard(key)

    def connections(self) -> Connections:
        """The mesh's connections so far, from the broker's log."""
        log = [line for line in self._rabbit.log() if _ISOLATED_MARK not in line]
        names = [line for line in log if _CONNECTION_NAME + self._namespace in line]
        if not names:
            raise RuntimeError("the broker's log names no connection of the mesh")
        staying = [name for name in names if not name.endswith(_ISOLATED_SUFFIX)]
        closed = [
            "\n".join(log[index : index + 2]) for index, line in enumerate(log) if _is_lost(line)
        ]
        return Connections(staying, len(names) - len(staying), closed)

    async def wait_for_confirms(self) -> None:
        """Wait until the broker has responded to each message."""
        await asyncio.gather(*list(self._confirm_tasks), return_exceptions=True)

    async def drain_full_queue(self) -> None:
        """Start to consume the full queue, so that replies waiting for space can be sent."""
        await self._listener.consume(f"{self._namespace}.{FULL_QUEUE}", "full", lambda _: None)

    async def _await_confirm(self, mark: str, confirmation: asyncio.Future[str]) -> None:
        self._record_result(mark, await confirmation)

    def _record_result(self, mark: str, result: str) -> None:
        self.count_by_result[result] += 1
        if result != "accepted":
            self.refused.add(mark)

    async def _reopen(self) -> None:
        self.count_by_close_reason[self._sender.close_reason[:200]] += 1
        await self._sender.__aexit__()
        self._sender = RawConnection(self._url)
        await self._sender.__aenter__()
        await self._declare_and_consume(self._sender, REPLIES, self._on_reply)
        await self._declare_and_consume(self._sender, f"{EVIL}.req", self._on_call)

    async def _declare_and_consume(
        self, wire: RawConnection, address: str, receive: Any, arguments: Headers | None = None
    ) -> None:
        name = f"{self._namespace}.{address}"
        await wire.declare(name, exclusive=False, durable=True, arguments=arguments or {})
        await wire.bind(name, self._exchange, address)
        if receive is not None:
            await wire.consume(name, address, receive)

    async def _listen(self, connection: RawConnection) -> None:
        tap_queue = f"{self._namespace}.tap"
        await connection.declare(
            tap_queue,
            exclusive=True,
            arguments={"x-max-length": 1000, "x-max-length-bytes": 10_000_000},
        )
        for agent in AGENTS:
            for suffix in ("req", "nested", "resp"):
                await connection.bind(tap_queue, self._exchange, f"{agent}.{suffix}")
            await connection.consume(
                f"{self._namespace}.{agent}.dlq", f"dead {agent}", self._on_dead
            )
        for name in await self._rabbit.messages():
            if name.startswith(self._namespace) and ".private." in name:
                await connection.bind(
                    tap_queue, self._exchange, name.removeprefix(f"{self._namespace}.")
                )
        await connection.consume(tap_queue, "tap", self._on_observed)

    def _on_observed(self, received: ReceivedMessage) -> None:
        message = message_of(received)
        if message is None or marks_of(
            str(message.properties.get("message_id", "")).encode(), received.body
        ):
            return
        kind = str(message.properties.get("type", ""))
        self._world.record_observed(kind, message)
        reply_to = str(message.properties.get("reply_to", ""))
        if ".private." in reply_to and reply_to not in self._world.private_queues:
            self._world.private_queues.append(reply_to)

    def _on_call(self, received: ReceivedMessage) -> None:
        message = message_of(received)
        if (
            message is not None
            and "reply_to" in message.properties
            and "x-parent-task-id" in message.headers
        ):
            self._world.record_call(message)

    def _on_reply(self, received: ReceivedMessage) -> None:
        self.replied |= marks_of(received.header, received.body)

    def _on_dead(self, received: ReceivedMessage) -> None:
        self.dead |= marks_of(received.header, received.body)


def _is_lost(line: str) -> bool:
    return "closing AMQP connection" in line and "'guest'" in line and "[info]" not in line


def message_of(received: ReceivedMessage) -> WireMessage | None:
    """Rebuild a received message in order to resend it; `None` if an exact copy is impossible."""
    decoded = decode_header(received.header)
    if decoded is None:
        return None
    properties, headers = decoded
    copied_headers: Headers = {}
    copied_headers.update(headers)
    return WireMessage(
        received.key, {**properties, "delivery_mode": 2}, copied_headers, received.body
    )
