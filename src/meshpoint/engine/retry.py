"""Wait for an unavailable database or broker, without answering or abandoning any task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_never,
    wait_random_exponential,
)

from meshpoint.errors import (
    BrokerUnavailable,
    CommitInDoubt,
    RowLocked,
    StoreUnavailable,
    Unavailable,
)
from meshpoint.model.events import Step
from meshpoint.ports.clock import Clock, OutageTracker
from meshpoint.ports.observer import Steps

_T = TypeVar("_T")

_BACKOFF = wait_random_exponential(multiplier=0.1, max=2.0)


class Retry:
    """Retries attempts during an outage, and remembers whether the database is unavailable.

    Attempts must be idempotent. Store methods are if they get the same ids, and publishes are
    because their message ids are stable.
    """

    def __init__(self, clock: Clock, steps: Steps) -> None:
        self._clock = clock
        self._steps = steps
        self._store_outage, self._broker_outage = (
            OutageTracker(clock.monotonic),
            OutageTracker(clock.monotonic),
        )
        self._broker_up_since: float | None = float("-inf")

    @property
    def is_store_unavailable(self) -> bool:
        """Whether the database was unavailable when last asked."""
        return self._store_outage.active

    async def until_available(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Retry `attempt` until it succeeds, however long the outage."""
        try:
            return await attempt()
        except Unavailable as error:
            return await self._retry(attempt, stop_never, error)

    async def for_at_most(self, attempt: Callable[[], Awaitable[_T]], limit: timedelta) -> _T:
        """Retry `attempt`, and raise its last `Unavailable` after about `limit`."""
        give_up_at = self._clock.monotonic() + limit.total_seconds()
        try:
            return await attempt()
        except Unavailable as error:
            return await self._retry(
                attempt, lambda _: self._clock.monotonic() >= give_up_at, error
            )

    async def if_available(self, attempt: Callable[[], Awaitable[_T]], limit: timedelta) -> _T:
        """Retry `attempt`, and raise `StoreUnavailable` after about `limit`.

        If it raises, nothing was written: an attempt whose COMMIT is in doubt is retried until the
        database gives a definite answer.
        """
        is_in_doubt = False

        async def attempt_noting_doubt() -> _T:
            nonlocal is_in_doubt
            try:
                return await attempt()
            except CommitInDoubt:  # also a locked row: that task must not be kept in memory too
                is_in_doubt = True
                raise

        try:
            return await self.for_at_most(attempt_noting_doubt, limit)
        except StoreUnavailable:
            if not is_in_doubt:
                raise
            return await self.until_available(attempt)

    async def _retry(
        self,
        attempt: Callable[[], Awaitable[_T]],
        stop: Callable[[RetryCallState], bool],
        first_error: Unavailable,
    ) -> _T:
        # Setting up tenacity costs more than most attempts, so wait for the first failure.
        failures = [first_error]
        if isinstance(first_error, RowLocked):
            self._steps.emit(Step.ROW_LOCKED, error=str(first_error))

        async def next_attempt() -> _T:
            try:
                if failures:
                    raise failures.pop()
                return await attempt()
            except Unavailable as error:
                self.record_outage(error)
                raise

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=_BACKOFF,
            stop=stop,
            sleep=lambda seconds: self._clock.sleep(timedelta(seconds=seconds)),
            reraise=True,
        )
        return await retrying(next_attempt)

    def record_outage(self, error: Unavailable) -> None:
        """Report an outage of the database or broker, at once and then at growing intervals."""
        if isinstance(error, RowLocked):
            return  # the database works, except for one row
        if isinstance(error, StoreUnavailable):
            if (seconds := self._store_outage.record_failure()) is not None:
                self._steps.emit(Step.STORE_UNAVAILABLE, error=str(error), seconds=round(seconds))
        elif (
            isinstance(error, BrokerUnavailable)
            and (seconds := self._broker_outage.record_failure()) is not None
        ):
            self._steps.emit(Step.BROKER_UNAVAILABLE, error=str(error), seconds=round(seconds))

    def record_recovery(self) -> bool:
        """Report that the database is available again. Returns `True` if there was an outage."""
        outage = self._store_outage
        return outage.active and self._end_outage(outage, Step.STORE_AVAILABLE)

    def record_broker_recovery(self) -> bool:
        """Report that the broker accepts messages again. Returns `True` if there was an outage."""
        outage = self._broker_outage
        return outage.active and self._end_outage(outage, Step.BROKER_AVAILABLE)

    def observe_broker(self, *, is_up: bool) -> None:
        """Note whether the broker's connection works, for `broker_uptime`."""
        if not is_up:
            self._broker_up_since = None
        elif self._broker_up_since is None:
            self._broker_up_since = self._clock.monotonic()

    @property
    def broker_uptime(self) -> float:
        """Seconds since the last outage of the broker that this process has seen."""
        up_since = self._broker_up_since
        return 0.0 if up_since is None else self._clock.monotonic() - up_since

    def _end_outage(self, outage: OutageTracker, step: Step) -> bool:
        seconds, reported = outage.record_success()
        if reported:
            self._steps.emit(step, seconds=round(seconds))
        return True
