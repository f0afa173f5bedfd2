"""What the fuzzer's sides for queues in tables have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .amqp import WireMessage
from .mesh import AGENTS
from .rabbit_side import Connections
from .recipes import EVIL, REPLIES, FuzzState

TEXTS = ("type", "message_id", "correlation_id", "app_id", "reply_to", "user_id")
POLL_SECONDS = 0.02
DECLARED = (f"{EVIL}.req", f"{EVIL}.resp", f"{EVIL}.dlq", REPLIES)
"""Addresses of the queues that a side declares."""
DEAD_LETTERS = [f"{agent}.dlq" for agent in (*AGENTS, EVIL, "ledger")]


class RowSide:
    """Counterpart of `RabbitSide` for queues in tables."""

    def __init__(self, namespace: str, world: FuzzState) -> None:
        self._namespace, self._world = namespace, world
        self._last_row_id = 0
        self.count_by_result: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.dead: set[str] = set()
        self.replied: set[str] = set()
        self.count_by_close_reason: Counter[str] = Counter()

    def connections(self) -> Connections:
        """Empty, because connections of other senders are not watched."""
        return Connections()

    async def wait_for_confirms(self) -> None:
        """Return at once: nothing is in flight here."""

    def record_result(self, mark: str, result: str) -> None:
        """Count what became of a message; a message that no queue has is accounted for."""
        self.count_by_result[result] += 1
        if result != "accepted":
            self.refused.add(mark)

    def observe(
        self,
        address: str,
        properties: Mapping[str, Any],
        headers: Any,
        body: object,
        *,
        call: bool,
    ) -> None:
        """Keep a message of another sender as material for recipes."""
        if not isinstance(headers, dict) or not isinstance(body, bytes):
            return
        texts = {name: properties[name] for name in TEXTS if isinstance(properties.get(name), str)}
        message = WireMessage(address, texts, headers, body)
        if not call:
            self._world.record_observed(str(properties.get("type")), message)
            reply_to = texts.get("reply_to", "")
            if ".private." in reply_to and reply_to not in self._world.private_queues:
                self._world.private_queues.append(reply_to)
        elif "reply_to" in texts and "x-parent-task-id" in headers:
            self._world.record_call(message)

    def queue_name(self, address: str) -> str:
        """Name of the queue at `address`."""
        return f"{self._namespace}.{address}"


def to_bytes(value: object) -> bytes:
    """Bytes in which marks can be found."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
