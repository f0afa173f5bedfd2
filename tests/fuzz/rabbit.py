"""The fuzzer's connection to RabbitMQ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from servers import RabbitServer

from .amqp import KEEP, Headers, Letter, Received, Wire, readable
from .mesh import AGENTS
from .recipes import CLOSING, EVE, EVIL, FULL, ME, OPERATOR, REPLIES, World
from .replica import marks_of

_PASSWORD = "mallory"
_APART = " apart"
"""Suffix of the names of connections that try a single suspicious message."""
_ISOLATED = " isolated "
"""Part of the names of isolated processes' connections.

These processes may be killed, and a busy machine has more of them.
"""
_NAMED = "client-provided name: meshpoint "
_UNCONFIRMED = 300
_WEARING = 5.0
"""Seconds for the broker to redeliver messages often enough."""


@dataclass(frozen=True)
class Connections:
    """The broker's log lines on connections that stay open and on lost connections.

    `apart` counts the connections that were opened to try one message.
    """

    opened: list[str] = field(default_factory=list)
    apart: int = 0
    closed: list[str] = field(default_factory=list)

    def since(self, earlier: Connections) -> Connections:
        """The connections that were added after `earlier`."""
        opened, closed = self.opened[len(earlier.opened) :], self.closed[len(earlier.closed) :]
        return Connections(opened, self.apart - earlier.apart, closed)


class RabbitSide:
    """Records all traffic, plays the lying peer, sends letters, and collects dead letters.

    The letters are sent under a separate login.
    """

    def __init__(self, rabbit: RabbitServer, namespace: str, world: World) -> None:
        self._rabbit, self._namespace, self._world = rabbit, namespace, world
        self._exchange = f"{namespace}.mesh"
        self._stack = AsyncExitStack()
        self._telling: dict[asyncio.Task[None], None] = {}
        self._url = rabbit.url.replace("guest:guest", f"{ME}:{_PASSWORD}")
        # queues in use by a group of worn letters; one group per queue
        self.wearing: set[str] = set()
        self.words: Counter[str] = Counter()
        self.refused: set[str] = set()  # marks of messages refused by the broker
        self.dead: set[str] = set()  # marks among the dead letters
        self.replied: set[str] = set()  # marks in replies to the fuzzer
        # reasons why the broker closed the fuzzer's connection
        self.closings: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for login in (ME, OPERATOR):
            await self._rabbit.control("add_user", login, _PASSWORD)
            await self._rabbit.control("set_permissions", login, ".*", ".*", ".*")
        operators = self._rabbit.url.replace("guest:guest", f"{OPERATOR}:{_PASSWORD}")
        self._mouth = await self._stack.enter_async_context(Wire(self._url))
        self._operator = await self._stack.enter_async_context(Wire(operators))
        self._hands = await self._stack.enter_async_context(Wire(self._rabbit.url))
        self._ears = await self._stack.enter_async_context(Wire(self._rabbit.url))
        await self._listen(self._ears)
        await self._queue(self._mouth, REPLIES, self._on_reply)
        for name in (EVE, OPERATOR):
            await self._mouth.bind(f"{self._namespace}.{REPLIES}", self._exchange, f"{name}.replies")
        await self._queue(self._mouth, f"{EVIL}.req", self._on_call)
        await self._queue(self._mouth, f"{EVIL}.resp", lambda _: None)
        full: Headers = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await self._queue(self._mouth, FULL, None, full)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._telling):
            task.cancel()
        await self._mouth.__aexit__()
        await self._stack.aclose()

    async def send(self, mark: str, recipe: str, letter: Letter) -> None:
        """Publish; the broker's response is recorded when it arrives."""
        if recipe in CLOSING:
            async with Wire(self._url) as own:
                told = await own.publish(self._exchange, letter)
                self._enter(mark, await told)
            return
        if self._mouth.closed:
            await self._reopen()
        while len(self._telling) > _UNCONFIRMED:
            await asyncio.wait(list(self._telling), return_when=asyncio.FIRST_COMPLETED)
        wire = self._operator if letter.properties.get("user_id") == OPERATOR else self._mouth
        task = asyncio.create_task(self._tell(mark, await wire.publish(self._exchange, letter)))
        self._telling[task] = None
        task.add_done_callback(lambda done: self._telling.pop(done, None))

    async def wear(
        self, mark: str, recipe: str, letters: Sequence[Letter], times: int, then: Callable[[], Awaitable[None]]
    ) -> None:
        """Have the broker redeliver `letters`, published to one request queue, `times` times.

        Replicas receive them after `then`, all at once, as messages that were delivered often.
        """
        key = letters[0].key
        self.wearing.add(key)
        kept, worn, all_worn = list[int](), 0, asyncio.Event()

        def receive(received: Received) -> str:
            nonlocal worn
            found = readable(received.header)
            count = found[1].get("x-delivery-count", 0) if found else 0
            own = mark in marks_of(received.header, received.body)
            if own and not all_worn.is_set() and isinstance(count, int) and count < times:
                self._hands.give_back(received.tag)
                return KEEP
            kept.append(received.tag)
            worn += own
            if worn >= len(letters):
                all_worn.set()
            return KEEP

        await self._hands.consume(f"{self._namespace}.{key}", mark, receive, priority=10)
        for letter in letters:
            await self.send(mark, recipe, letter)
        with suppress(TimeoutError):
            async with asyncio.timeout(_WEARING):
                await all_worn.wait()
        await then()
        await self._hands.cancel(mark)
        for tag in kept:
            self._hands.give_back(tag)
        self.wearing.discard(key)

    def connections(self) -> Connections:
        """The mesh's connections so far, from the broker's log."""
        log = [line for line in self._rabbit.log() if _ISOLATED not in line]
        names = [line for line in log if _NAMED + self._namespace in line]
        if not names:
            raise RuntimeError("the broker's log names no connection of the mesh")
        stay = [name for name in names if not name.endswith(_APART)]
        closed = ["\n".join(log[at : at + 2]) for at, line in enumerate(log) if _is_lost(line)]
        return Connections(stay, len(names) - len(stay), closed)

    async def all_told(self) -> None:
        """Wait until the broker has responded to each message."""
        await asyncio.gather(*list(self._telling), return_exceptions=True)

    async def open_full(self) -> None:
        """Start to consume the full queue, so that replies waiting for space can be sent."""
        await self._ears.consume(f"{self._namespace}.{FULL}", "full", lambda _: None)

    async def _tell(self, mark: str, told: asyncio.Future[str]) -> None:
        self._enter(mark, await told)

    def _enter(self, mark: str, word: str) -> None:
        self.words[word] += 1
        if word != "accepted":
            self.refused.add(mark)

    async def _reopen(self) -> None:
        self.closings[self._mouth.why[:200]] += 1
        await self._mouth.__aexit__()
        self._mouth = Wire(self._url)
        await self._mouth.__aenter__()
        await self._queue(self._mouth, REPLIES, self._on_reply)
        await self._queue(self._mouth, f"{EVIL}.req", self._on_call)

    async def _queue(self, wire: Wire, address: str, receive: object, arguments: Headers | None = None) -> None:
        name = f"{self._namespace}.{address}"
        await wire.declare(name, exclusive=False, durable=True, arguments=arguments or {})
        await wire.bind(name, self._exchange, address)
        if receive is not None:
            await wire.consume(name, address, receive)  # type: ignore[arg-type]

    async def _listen(self, ears: Wire) -> None:
        tap = f"{self._namespace}.tap"
        await ears.declare(tap, exclusive=True, arguments={"x-max-length": 1000, "x-max-length-bytes": 10_000_000})
        for agent in AGENTS:
            for suffix in ("req", "nested", "resp"):
                await ears.bind(tap, self._exchange, f"{agent}.{suffix}")
            await ears.consume(f"{self._namespace}.{agent}.dlq", f"dead {agent}", self._on_dead)
        for name in await self._rabbit.messages():
            if name.startswith(self._namespace) and ".private." in name:
                await ears.bind(tap, self._exchange, name.removeprefix(f"{self._namespace}."))
        await ears.consume(tap, "tap", self._on_passing)

    def _on_passing(self, received: Received) -> None:
        letter = letter_of(received)
        if letter is None or marks_of(str(letter.properties.get("message_id", "")).encode(), received.body):
            return
        kind = str(letter.properties.get("type", ""))
        self._world.passed(kind, letter)
        reply_to = str(letter.properties.get("reply_to", ""))
        if ".private." in reply_to and reply_to not in self._world.privates:
            self._world.privates.append(reply_to)

    def _on_call(self, received: Received) -> None:
        letter = letter_of(received)
        if letter is not None and "reply_to" in letter.properties and "x-parent-task-id" in letter.headers:
            self._world.asked_me(letter)

    def _on_reply(self, received: Received) -> None:
        self.replied |= marks_of(received.header, received.body)

    def _on_dead(self, received: Received) -> None:
        self.dead |= marks_of(received.header, received.body)


def _is_lost(line: str) -> bool:
    return "closing AMQP connection" in line and "'guest'" in line and "[info]" not in line


def letter_of(received: Received) -> Letter | None:
    """Rebuild a received letter in order to resend it; `None` if an exact copy is impossible."""
    found = readable(received.header)
    if found is None:
        return None
    properties, headers = found
    plain: Headers = {}
    plain.update(headers)
    return Letter(received.key, {**properties, "delivery_mode": 2}, plain, received.body)
