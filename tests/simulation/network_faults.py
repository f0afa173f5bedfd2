"""The fate of each call to a server, drawn from the seed and traced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random

from .loop import current_process


class CallResult(StrEnum):
    """Result of a call as the caller sees it."""

    DONE = "done"
    REFUSED = "refused"  # it certainly did not happen
    DOUBT = "in doubt"  # it happened, but the response was lost
    LOST = "lost, in doubt"  # it did not happen, but the caller cannot know


@dataclass(frozen=True, slots=True)
class Fate:
    """One call: latency there and back (virtual seconds), and the result for the caller."""

    request_latency: float
    response_latency: float
    result: CallResult

    @property
    def takes_effect(self) -> bool:
        """Whether the server executes the call."""
        return self.result in {CallResult.DONE, CallResult.DOUBT}


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each kind of fault, per call or message."""

    refused: float = 0.0
    doubt: float = 0.0
    slow: float = 0.0  # seconds instead of milliseconds, so that others overtake
    duplicated: float = 0.0
    overloaded: float = 0.0
    broadcast_lost: float = 0.0
    ack_lost: float = 0.0  # when a connection drops


NO_FAULTS = FaultRates()
_MAX_RATES = FaultRates(
    refused=0.12,
    doubt=0.1,
    slow=0.06,
    duplicated=0.15,
    overloaded=0.08,
    broadcast_lost=0.5,
    ack_lost=0.7,
)


def draw_fault_rates(rng: Random) -> FaultRates:
    """Some faults are absent, some frequent: a seed with all of them frequent finds less."""
    return FaultRates(
        **{
            each.name: rng.choice([0, 0, rng.random(), 1]) * getattr(_MAX_RATES, each.name)
            for each in fields(FaultRates)
        }
    )


class Network:
    """Decides the fate of calls. `fault_rates` may change at any time."""

    def __init__(self, rng: Random, trace: Callable[[str], None]) -> None:
        self._rng, self._trace = rng, trace
        self.fault_rates = NO_FAULTS
        self._outages: dict[str, float] = {}

    def start_outage(self, process: str, server: str, seconds: float) -> None:
        """Block calls from `process` ("" for all) to `server` for a while."""
        until = asyncio.get_running_loop().time() + seconds
        self._outages[f"{process}>{server}"] = until

    def stop_faults(self) -> None:
        """Stop all faults."""
        self.fault_rates = NO_FAULTS
        self._outages.clear()

    def is_unreachable(self, process: str, server: str) -> bool:
        """Whether `process` cannot reach `server` now."""
        now = asyncio.get_running_loop().time()
        return any(
            self._outages.get(f"{process_name}>{server}", 0.0) > now
            for process_name in ("", process)
        )

    def happens(self, probability: float) -> bool:
        """True with probability `probability`."""
        return probability > 0 and self._rng.random() < probability

    def random_integer(self, minimum: int, maximum: int) -> int:
        """A random integer from `minimum` to `maximum`, both included."""
        return self._rng.randint(minimum, maximum)

    def delay(self) -> float:
        """One-way latency in seconds."""
        if self.happens(self.fault_rates.slow):
            return self._rng.uniform(0.1, 4.0)
        return self._rng.uniform(0.0002, 0.004)

    def draw_fate(self, server: str, method: str) -> Fate:
        """Fate of a call that the running process makes now."""
        result = self._draw_result(server)
        if result is not CallResult.DONE:
            self._trace(f"{current_process()} {server}.{method}: {result}")
        return Fate(self.delay(), self.delay(), result)

    def _draw_result(self, server: str) -> CallResult:
        if self.is_unreachable(current_process(), server):
            return CallResult.REFUSED
        if self.happens(self.fault_rates.refused):
            return CallResult.REFUSED
        if self.happens(self.fault_rates.doubt):
            return self._rng.choice([CallResult.DOUBT, CallResult.DOUBT, CallResult.LOST])
        return CallResult.DONE
