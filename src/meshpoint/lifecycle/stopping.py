"""How a replica is told to end."""

from __future__ import annotations

import asyncio


class StopRequest(asyncio.Event):
    """An event that begins the drain, and why it was set: the name of a signal, say."""

    reason: str | None = None

    def because(self, reason: str) -> None:
        """Begin the drain. The first reason counts."""
        if not self.is_set():
            self.reason = reason
        self.set()


def reason_of(stop: asyncio.Event) -> dict[str, str]:
    """What a log line says of the reason, if it is known."""
    reason = getattr(stop, "reason", None)
    return {"reason": reason} if isinstance(reason, str) else {}
