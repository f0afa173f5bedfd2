"""What happens, as it happens. Logs, metrics and tests hear the same events."""

from __future__ import annotations

from typing import Protocol

from meshpoint.model.events import Event


class Observer(Protocol):
    """Hears every event, synchronously, at the place in the code where it happens."""

    def emit(self, event: Event) -> None:
        """Take note. Must not raise and must not block."""
