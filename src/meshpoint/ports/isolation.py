"""Run a segment in its own process, so that a crash there affects no other task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol

from meshpoint.model.tasks import Run


class ExitKind(Enum):
    """How an isolated run ended."""

    SETTLED = (
        auto()
    )  # it committed an outcome, pause or release, and sent the messages that follow
    DIED = auto()  # its process died before that
    NOT_STARTED = (
        auto()
    )  # no agent code ran: connections failed, or the process could not be started
    IMPOSSIBLE = auto()  # the process cannot import the agent


@dataclass(frozen=True, slots=True)
class Exit:
    """How an isolated run ended. `reason` completes the sentence "its process …"."""

    kind: ExitKind
    reason: str = ""


class StopSignal(StrEnum):
    """A stop request to an isolated run."""

    CANCEL = "cancel"  # stop the code and end the task as cancelled
    DRAIN = "drain"  # stop the code and release the task


class IsolatedRun(Protocol):
    """One segment in its own process, which dies with the process that started it."""

    async def wait(self) -> Exit:
        """Wait for the process to end and return how it ended."""

    def signal(self, stop_signal: StopSignal) -> None:
        """Send a stop request and return immediately."""

    def kill(self) -> None:
        """Kill the process if it is still running."""


class Isolation(Protocol):
    """Factory for isolated runs."""

    async def start(self, run: Run, on_started: Callable[[], None]) -> IsolatedRun:
        """Start a process for the segment owned by `run`.

        Args:
            run: the run to continue in the new process.
            on_started: called once the process renews the lease itself.

        Raises:
            OSError: the process could not be started.
        """

    async def close(self) -> None:
        """Release resources kept for later runs, such as a template process."""
