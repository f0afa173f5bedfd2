"""The request that ends a replica, with its reason."""

from __future__ import annotations

import asyncio


class StopRequest(asyncio.Event):
    """An event that starts the drain, with its reason, such as the name of a signal."""

    reason: str | None = None

    def because(self, reason: str) -> None:
        """Start the drain. Only the first reason is kept."""
        if not self.is_set():
            self.reason = reason
        self.set()


def reason_of(stop: asyncio.Event) -> dict[str, str]:
    """The stop reason as a log field, or an empty dict if unknown."""
    reason = getattr(stop, "reason", None)
    return {"reason": reason} if isinstance(reason, str) else {}
