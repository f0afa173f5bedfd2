"""Runs one segment in its own process, so that its death affects nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol

from meshpoint.model.checkpoint import Run


class Ending(Enum):
    """How an isolated run ended."""

    SETTLED = auto()  # it committed an outcome, pause or release, and sent the messages that follow
    DIED = auto()  # its process died before that
    UNSTARTED = auto()  # no agent code ran: connections failed, or the process could not be started
    IMPOSSIBLE = auto()  # the process cannot import the agent


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of an isolated run. `reason` completes the sentence "its process …"."""

    ending: Ending
    reason: str = ""


class Word(StrEnum):
    """A request to an isolated run."""

    CANCEL = "cancel"  # stop the code and end the task as cancelled
    DRAIN = "drain"  # stop the code and release the task


class IsolatedRun(Protocol):
    """One segment in its own process. It ends with the process that started it."""

    async def exit(self) -> Exit:
        """Wait until the process has ended."""

    def tell(self, word: Word) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """Kill the process if it is still running."""


class Isolation(Protocol):
    """Starts processes for isolated runs."""

    async def start(self, run: Run, on_started: Callable[[], None]) -> IsolatedRun:
        """Run the segment that `run` owns. `on_started` is called once the process renews the lease itself.

        Raises:
            OSError: the process could not be started.
        """

    async def close(self) -> None:
        """Release resources kept for later runs."""
