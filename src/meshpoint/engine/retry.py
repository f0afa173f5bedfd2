"""Wait for an unavailable database or broker, without answering or abandoning any task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_never, wait_random_exponential

from meshpoint.errors import BrokerUnavailable, CommitInDoubt, RowLocked, StoreUnavailable, Unavailable
from meshpoint.model.events import Step
from meshpoint.model.outage import Outage
from meshpoint.ports.clock import Clock
from meshpoint.ports.observer import Steps

T = TypeVar("T")

_BACK_OFF = wait_random_exponential(multiplier=0.1, max=2.0)


class Patience:
    """Retries attempts during an outage, and remembers whether the database is unavailable.

    Attempts must be idempotent. Store methods are if they get the same ids, and publishes are
    because their message ids are stable.
    """

    def __init__(self, clock: Clock, steps: Steps) -> None:
        self._clock = clock
        self._steps = steps
        self._store, self._broker = Outage(clock.monotonic), Outage(clock.monotonic)

    @property
    def store_away(self) -> bool:
        """Whether the last database attempt failed."""
        return self._store.active

    async def until_answered(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry `attempt` until it succeeds, however long the outage."""
        return await self._repeat(attempt, stop_never)

    async def for_a_while(self, attempt: Callable[[], Awaitable[T]], limit: timedelta) -> T:
        """Retry `attempt`, and raise its last `Unavailable` after about `limit`."""
        give_up_at = self._clock.monotonic() + limit.total_seconds()
        return await self._repeat(attempt, lambda _: self._clock.monotonic() >= give_up_at)

    async def unless_away(self, attempt: Callable[[], Awaitable[T]], limit: timedelta) -> T:
        """Retry `attempt`, and raise `StoreUnavailable` after about `limit`.

        If it raises, nothing was written: an attempt whose COMMIT is in doubt is retried until the
        database gives a definite answer.
        """
        in_doubt = False

        async def noticing() -> T:
            nonlocal in_doubt
            try:
                return await attempt()
            except CommitInDoubt:  # also a locked row: that task must not be kept in memory too
                in_doubt = True
                raise

        try:
            return await self.for_a_while(noticing, limit)
        except StoreUnavailable:
            if not in_doubt:
                raise
            return await self.until_answered(attempt)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]], stop: Callable[[RetryCallState], bool]) -> T:
        try:
            return await attempt()
        except Unavailable as error:
            return await self._again(attempt, stop, error)

    async def _again(
        self, attempt: Callable[[], Awaitable[T]], stop: Callable[[RetryCallState], bool], failed: Unavailable
    ) -> T:
        # Setting up tenacity costs more than most attempts, so wait for the first failure.
        failures = [failed]
        if isinstance(failed, RowLocked):
            self._steps.note(Step.ROW_LOCKED, error=str(failed))

        async def trial() -> T:
            try:
                if failures:
                    raise failures.pop()
                return await attempt()
            except Unavailable as error:
                self.note_away(error)
                raise

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=_BACK_OFF,
            stop=stop,
            sleep=lambda seconds: self._clock.sleep(timedelta(seconds=seconds)),
            reraise=True,
        )
        return await retrying(trial)

    def note_away(self, error: Unavailable) -> None:
        """Report an outage of the database or broker, at once and then at growing intervals."""
        if isinstance(error, RowLocked):
            return  # the database works, except for one row
        if isinstance(error, StoreUnavailable):
            if (seconds := self._store.failed()) is not None:
                self._steps.note(Step.STORE_AWAY, error=str(error), seconds=round(seconds))
        elif isinstance(error, BrokerUnavailable) and (seconds := self._broker.failed()) is not None:
            self._steps.note(Step.BROKER_AWAY, error=str(error), seconds=round(seconds))

    def note_back(self) -> bool:
        """Report that the database is available again. Returns `True` if there was an outage."""
        return self._over(self._store, Step.STORE_BACK)

    def note_broker_back(self) -> bool:
        """Report that the broker accepts messages again. Returns `True` if there was an outage."""
        return self._over(self._broker, Step.BROKER_BACK)

    def _over(self, outage: Outage, step: Step) -> bool:
        if not outage.active:
            return False
        seconds, reported = outage.over()
        if reported:
            self._steps.note(step, seconds=round(seconds))
        return True
