"""The fate of each call to a server, drawn from the seed and traced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random

from .loop import current_process


class Word(StrEnum):
    """Result of a call as the caller sees it."""

    DONE = "done"
    REFUSED = "refused"  # it certainly did not happen
    DOUBT = "in doubt"  # it happened, but the response was lost
    LOST = "lost, in doubt"  # it did not happen, but the caller cannot know


@dataclass(frozen=True, slots=True)
class Fate:
    """One call: latency there and back (virtual seconds), and the result for the caller."""

    there: float
    back: float
    word: Word

    @property
    def takes_effect(self) -> bool:
        """Whether the server executes the call."""
        return self.word in {Word.DONE, Word.DOUBT}


@dataclass(frozen=True, slots=True)
class Climate:
    """Probability of each kind of fault, per call or message."""

    refused: float = 0.0
    doubt: float = 0.0
    slow: float = 0.0  # seconds instead of milliseconds, so that others overtake
    duplicated: float = 0.0
    overloaded: float = 0.0
    broadcast_lost: float = 0.0
    ack_lost: float = 0.0  # when a connection drops


CALM = Climate()
_WORST = Climate(
    refused=0.12, doubt=0.1, slow=0.06, duplicated=0.15, overloaded=0.08, broadcast_lost=0.5, ack_lost=0.7
)


def draw_climate(dice: Random) -> Climate:
    """Some faults are absent, some frequent: a seed with all of them frequent finds less."""
    return Climate(
        **{each.name: dice.choice([0, 0, dice.random(), 1]) * getattr(_WORST, each.name) for each in fields(Climate)}
    )


class Weather:
    """Decides the fate of calls. `climate` may change at any time."""

    def __init__(self, dice: Random, tell: Callable[[str], None]) -> None:
        self._dice, self._tell = dice, tell
        self.climate = CALM
        self._away: dict[str, float] = {}

    def cut(self, process: str, server: str, seconds: float) -> None:
        """Block calls from `process` ("" for all) to `server` for a while."""
        until = asyncio.get_running_loop().time() + seconds
        self._away[f"{process}>{server}"] = until

    def clear(self) -> None:
        """Stop all faults."""
        self.climate = CALM
        self._away.clear()

    def is_away(self, process: str, server: str) -> bool:
        """Whether `process` cannot reach `server` now."""
        now = asyncio.get_running_loop().time()
        return any(self._away.get(f"{who}>{server}", 0.0) > now for who in ("", process))

    def chance(self, likelihood: float) -> bool:
        """True with probability `likelihood`."""
        return likelihood > 0 and self._dice.random() < likelihood

    def between(self, least: int, most: int) -> int:
        """A random integer from `least` to `most`, both included."""
        return self._dice.randint(least, most)

    def delay(self) -> float:
        """One-way latency in seconds."""
        if self.chance(self.climate.slow):
            return self._dice.uniform(0.1, 4.0)
        return self._dice.uniform(0.0002, 0.004)

    def fate(self, server: str, what: str) -> Fate:
        """Fate of a call that the running process makes now."""
        word = self._word(server)
        if word is not Word.DONE:
            self._tell(f"{current_process()} {server}.{what}: {word}")
        return Fate(self.delay(), self.delay(), word)

    def _word(self, server: str) -> Word:
        if self.is_away(current_process(), server):
            return Word.REFUSED
        if self.chance(self.climate.refused):
            return Word.REFUSED
        if self.chance(self.climate.doubt):
            return self._dice.choice([Word.DOUBT, Word.DOUBT, Word.LOST])
        return Word.DONE
