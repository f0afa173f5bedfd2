"""When the sweeper may enforce time: not right after a start or an outage, when answers are still queued."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshpoint.ports.clock import Clock


class Grace:
    """Two waits that begin at a start and again after each outage."""

    def __init__(self, clock: Clock, settle_time: timedelta, lease: timedelta) -> None:
        self._clock = clock
        self._settle_time = settle_time
        self._lease = lease
        self._since: datetime = clock.now()

    def begin(self) -> None:
        """Start both waits again."""
        self._since = self._clock.now()

    @property
    def may_expire(self) -> bool:
        """Whether queued responses have had their time to arrive before deadlines are enforced."""
        return self._clock.now() >= self._since + self._settle_time

    @property
    def may_take_over(self) -> bool:
        """Whether owners have had their time to renew before their tasks are taken."""
        return self._clock.now() >= self._since + self._lease
