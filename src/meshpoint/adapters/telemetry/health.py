"""Whether this process is ready for work."""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.ports.observer import SelectiveObserver


class Health(SelectiveObserver):
    """Follows the events of `agents`, and finds out whether all of them serve.

    `is_connected` returns whether the broker is reachable and every consumer attached.
    """

    def __init__(self, agents: Collection[AgentName], is_connected: Callable[[], bool]) -> None:
        self._is_connected = is_connected
        self._starting, self._draining = set(agents), False
        self._without_store = set[AgentName]()
        self.handlers = {
            (Step.STARTED, Phase.INFO): self._on_started,
            (Step.DRAINING, Phase.INFO): self._on_draining,
            (Step.STORE_UNAVAILABLE, Phase.INFO): self._on_store_unavailable,
            (Step.STORE_AVAILABLE, Phase.INFO): self._on_store_available,
            (Step.SWEEP, Phase.AFTER): self._on_sweep_end,
        }

    def _on_started(self, event: Event) -> None:
        self._starting.discard(event.agent)

    def _on_draining(self, event: Event) -> None:
        self._draining = True

    def _on_store_unavailable(self, event: Event) -> None:
        self._without_store.add(event.agent)

    def _on_store_available(self, event: Event) -> None:
        self._without_store.discard(event.agent)

    def _on_sweep_end(self, event: Event) -> None:
        if event.detail.get("durable"):
            # A task's own process may have reported the outage, and ended since.
            self._without_store.discard(event.agent)

    def find_problem(self) -> str | None:
        """Why this process is not ready; `None` if it is."""
        if self._draining:
            return "draining"
        if self._starting:
            return f"starting: {', '.join(sorted(self._starting))}"
        if self._without_store:
            return f"database unavailable: {', '.join(sorted(self._without_store))}"
        return None if self._is_connected() else "broker unavailable, or a consumer not attached"
