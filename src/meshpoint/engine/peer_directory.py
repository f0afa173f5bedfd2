"""The cards of the peers that an agent discovers, refreshed in the background.

Until a pattern is followed, the replica asks for no cards and keeps none. From then on, it asks
for the cards of the followed agents once per `peer_refresh`, and receives the announcements of
replicas that start. The answers arrive in its private queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import translate
from functools import lru_cache

from meshpoint.engine.background import wait_for_first
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.senders import impersonation_error
from meshpoint.errors import ConfigurationError, PoisonMessage
from meshpoint.model.cards import AgentCard, CardBody, is_exact, parse_card
from meshpoint.model.envelopes import describe_message
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import (
    CARDS,
    DESCRIBE_ALL,
    Message,
    MessageType,
    Topic,
    describe_topic,
)
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.cards")

MAX_AGENTS = 1_000
MAX_OFFERED = 100
"""Maximum agents that a directory keeps, and that it offers at a time."""
_MAX_REPLICAS = 50
_MAX_BYTES = 64 * 1024 * 1024
"""Maximum replicas of one agent, and maximum bytes of all cards, that a directory keeps."""
_MAX_PATTERNS = 1_000
_MAX_LOGGED = 1_000
_COLLECT_SECONDS = 1.0
_QUIET_SECONDS = 0.25
"""A round collects answers for the first, or until none has come for the second."""
_READY_SECONDS = 3.0
_MISSED_ROUNDS = 3
_MISSED_ROUNDS_OF_LAST = 11
"""Rounds without an answer after which a replica's card, or the last card of an agent, is dropped.

A restart of all replicas should not hide an agent.
"""


@lru_cache(maxsize=1_000)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(_compile(pattern).match(name) for pattern in patterns)


@dataclass(slots=True)
class _Served:
    """A replica of a peer, and its card. `missed` counts the questions since its last answer."""

    card: AgentCard
    replica: str
    started_at: datetime
    size: int
    missed: int = 0

    @property
    def order(self) -> tuple[datetime, str]:
        """Greater if the replica started later."""
        return self.started_at, self.replica


class Directory:
    """The `meshpoint.model.peer_directory.PeerDirectory` of one replica."""

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self._allowed, self._denied = runtime.options.peers, runtime.options.denied_peers
        self._followed: set[str] = set()
        self._known: dict[str, dict[str, _Served]] = {}
        self._size = 0
        self._offers: dict[tuple[str, ...], tuple[AgentCard, ...]] = {}
        self._logged: set[str] = set()
        self._is_new_pattern, self._ready, self._heard = (asyncio.Event() for _ in range(3))
        self._answered: set[str] = set()
        self._ready.set()

    @property
    def is_configured(self) -> bool:
        """Whether the setting `peers` has patterns."""
        return bool(self._allowed)

    def follow(self, patterns: Sequence[str]) -> None:
        """Ask for the cards of agents that match `patterns`, from now on."""
        new = set(patterns or self._allowed) - self._followed
        if not new:
            return
        if len(self._followed) + len(new) > _MAX_PATTERNS:
            self._log_once("patterns", "more than %d patterns of peers", _MAX_PATTERNS)
            return
        self._followed |= new
        self._ready.clear()
        self._is_new_pattern.set()

    async def wait_ready(self) -> None:
        """Wait until the followed peers that are up have answered once, for at most 3 seconds."""
        if not self._ready.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_READY_SECONDS):
                    await self._ready.wait()

    def cards(self, patterns: Sequence[str]) -> tuple[AgentCard, ...]:
        """The cards of the known peers that match `patterns`, sorted by name."""
        key = tuple(patterns)
        offer = self._offers.get(key)
        if offer is None:
            if len(self._offers) >= _MAX_PATTERNS:
                self._offers.clear()
            offer = self._offers[key] = self._select(key or self._allowed)
        return offer

    def _select(self, patterns: Sequence[str]) -> tuple[AgentCard, ...]:
        names = [name for name in sorted(self._known) if self._may_use(name, patterns)]
        if len(names) > MAX_OFFERED:
            self._log_once(
                "offered",
                "%d peers match %s: only the first %d are offered; narrow peers",
                len(names),
                ", ".join(patterns)[:200],
                MAX_OFFERED,
            )
        return tuple([self._card_of(name) for name in names[:MAX_OFFERED]])

    def _card_of(self, name: str) -> AgentCard:
        return max(self._known[name].values(), key=lambda served: served.order).card

    def _may_use(self, name: str, patterns: Sequence[str]) -> bool:
        if name == self._runtime.agent and name not in patterns:
            return False
        allowed = not self._allowed or _matches(name, self._allowed)
        return allowed and _matches(name, patterns) and not _matches(name, self._denied)

    async def serve(self) -> None:
        """Ask for cards, at intervals and when a pattern is new. Never returns."""
        is_periodic = False
        while True:
            if not self._followed:
                await self._is_new_pattern.wait()
            self._is_new_pattern.clear()
            try:
                await self._ask(counts=is_periodic)
            finally:  # peers must not keep a turn waiting because the broker is unavailable
                if not self._is_new_pattern.is_set():
                    self._ready.set()
            await wait_for_first(
                self._is_new_pattern.wait(),
                self._runtime.clock.sleep(
                    self._runtime.options.peer_refresh * random.uniform(0.8, 1.2)
                ),
            )
            is_periodic = not self._is_new_pattern.is_set()

    async def serve_alone(self) -> None:
        """Like `serve`, in a process that serves no queue of its agent."""
        await self._is_new_pattern.wait()
        runtime = self._runtime
        await runtime.broker.declare(runtime.agent, runtime.replica.id)
        await runtime.broker.consume(
            runtime.in_process.reply_to, runtime.options.response_prefetch, self._receive_alone
        )
        await self.serve()

    def _receive_alone(self, delivery: Delivery) -> None:
        if delivery.message.type is MessageType.CARD:
            self.receive(delivery.message)
        self._runtime.background.spawn(self._ack, delivery)

    async def _ack(self, delivery: Delivery) -> None:
        await delivery.ack()

    async def _ask(self, *, counts: bool) -> None:
        """Ask for all followed cards, and collect answers for a second.

        `counts`: enough time has passed since the last round for a missing answer to count.
        """
        runtime = self._runtime
        self._answered.clear()
        names = self._exact_names()
        topics = [DESCRIBE_ALL] if names is None else [describe_topic(name) for name in names]
        try:
            await runtime.broker.subscribe(runtime.agent, runtime.replica.id, [CARDS])
            for topic in topics:
                await self._announce(topic)
        except ConfigurationError as error:
            self._log_once("subscribe", "peers cannot be discovered: %s", error)
            return
        if counts and runtime.broker.is_consuming(runtime.in_process.reply_to):
            self._count_missed()
        await self._collect(None if names is None else set(names))
        for pattern in self._followed:
            if is_exact(pattern) and pattern not in self._known:
                self._log_once(
                    f"silent {pattern}",
                    "the peer %s has sent no card: it is not offered to models until it does",
                    pattern,
                )

    def _exact_names(self) -> list[AgentName] | None:
        """The names to ask, or `None` to ask all agents."""
        patterns = self._followed
        if self._allowed and all(map(is_exact, self._allowed)):
            patterns = {name for name in self._allowed if _matches(name, patterns)}
        if not all(map(is_exact, patterns)):
            return None
        return [AgentName(name) for name in sorted(patterns) if self._may_use(name, [name])]

    async def _announce(self, topic: Topic) -> None:
        runtime = self._runtime
        message = describe_message(runtime.agent, runtime.in_process.reply_to)
        await runtime.broker.announce(topic, message)

    async def _collect(self, expected: set[AgentName] | None) -> None:
        now = asyncio.get_running_loop().time
        ends_at = now() + _COLLECT_SECONDS
        while expected is None or not expected <= self._answered:
            limit = ends_at - now()
            if expected is None and self._answered:
                limit = min(limit, _QUIET_SECONDS)
            try:
                async with asyncio.timeout(limit):
                    await self._heard.wait()
            except TimeoutError:
                return
            self._heard.clear()

    def _count_missed(self) -> None:
        """Count one more question to each replica, and drop replicas that no longer answer."""
        for name, replicas in list(self._known.items()):
            for served in replicas.values():
                served.missed += 1
            last = min(replicas.values(), key=lambda served: served.missed)
            for served in list(replicas.values()):
                limit = _MISSED_ROUNDS_OF_LAST if served is last else _MISSED_ROUNDS
                if served.missed >= limit:
                    self._remove(name, served)

    def receive(self, message: Message) -> None:
        """Keep the card in `message`, if its agent is followed. Invalid cards are dropped."""
        sender = message.app_id
        if not self._followed or not self._is_followed(sender):
            return
        try:
            if (problem := impersonation_error(message, self._runtime.options)) is not None:
                raise PoisonMessage(problem)
            body = parse_card(message.body, sender)
        except PoisonMessage as error:
            self._log_once(f"card {sender}", "the card of %s is refused: %.500s", sender, error)
            return
        self._keep(body, len(message.body))
        self._answered.add(sender)
        self._heard.set()

    def _is_followed(self, name: str) -> bool:
        return any(self._may_use(name, [pattern]) for pattern in self._followed)

    def _keep(self, body: CardBody, size: int) -> None:
        name = body.card.name
        replicas = self._known.get(name, {})
        known = replicas.get(body.replica)
        if known is not None and known.card == body.card and known.started_at == body.started_at:
            known.missed = 0
            return
        is_crowded = len(self._known) >= MAX_AGENTS and name not in self._known
        if (is_crowded and name not in self._followed) or self._size + size > _MAX_BYTES:
            self._log_once("full", "the card of %s and others are ignored: too many cards", name)
            return
        if known is not None:
            self._remove(name, known)
        served = _Served(body.card, body.replica, body.started_at, size)
        self._known.setdefault(name, {})[body.replica] = served
        self._size += size
        self._offers.clear()
        replicas = self._known[name]
        if len(replicas) > _MAX_REPLICAS:
            self._remove(name, min(replicas.values(), key=lambda served: served.order))

    def _remove(self, name: str, served: _Served) -> None:
        replicas = self._known[name]
        del replicas[served.replica]
        self._size -= served.size
        if not replicas:
            del self._known[name]
        self._offers.clear()

    def _log_once(self, key: str, text: str, *values: object) -> None:
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            log.warning(f"agent %s: {text}", self._runtime.agent, *values)
