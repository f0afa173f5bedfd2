"""Whether this process is ready for work."""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName


class Health:
    """Follows the events of `agents`, and finds out whether all of them serve.

    `is_connected` returns whether the broker is reachable and every consumer attached.
    """

    def __init__(self, agents: Collection[AgentName], is_connected: Callable[[], bool]) -> None:
        self._is_connected = is_connected
        self._starting, self._draining = set(agents), False
        self._without_store = set[AgentName]()

    def emit(self, event: Event) -> None:
        """Note what `event` says about its agent."""
        match event.step, event.phase:
            case Step.STARTED, _:
                self._starting.discard(event.agent)
            case Step.DRAINING, _:
                self._draining = True
            case Step.STORE_UNAVAILABLE, _:
                self._without_store.add(event.agent)
            case Step.STORE_AVAILABLE, _:
                self._without_store.discard(event.agent)
            case Step.SWEEP, Phase.AFTER if event.detail.get("durable"):
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
