"""Runs one segment in a process of its own, so that its death ends nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol

from meshpoint.model.checkpoint import Run


class Ending(Enum):
    """How an isolated run ended."""

    SETTLED = auto()  # it committed the outcome, a pause or a release, and sent what followed
    DIED = auto()  # its process died first
    UNSTARTED = auto()  # no agent code ran: its connections failed, or there was no process to be had
    IMPOSSIBLE = auto()  # no agent code can run there: the process cannot import the agent


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of an isolated run. `reason` completes the sentence "its process …"."""

    ending: Ending
    reason: str = ""


class Word(StrEnum):
    """What an isolated run may be asked to do."""

    CANCEL = "cancel"  # stop the code, and end the task as cancelled
    DRAIN = "drain"  # stop the code, and release the task


class IsolatedRun(Protocol):
    """One segment in its own process. It ends with the process that started it."""

    async def exit(self) -> Exit:
        """Wait until its process has ended."""

    def tell(self, word: Word) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """End its process now, if it still runs."""


class Isolation(Protocol):
    """Starts processes for isolated runs."""

    async def start(self, run: Run, on_started: Callable[[], None]) -> IsolatedRun:
        """Run the segment that `run` owns. `on_started` is called once the process renews the lease itself.

        Raises:
            OSError: there is no process to be had.
        """
