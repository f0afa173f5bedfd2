"""Decides when the sweeper may enforce deadlines and leases.

Right after a start or an outage it may not, because responses are still queued.
"""

from __future__ import annotations

from datetime import timedelta

from meshpoint.ports.clock import Clock


class Grace:
    """Two grace periods that begin at the start and after each outage.

    They are measured by the monotonic clock.
    """

    def __init__(self, clock: Clock, settle_time: timedelta, lease: timedelta) -> None:
        self._clock = clock
        self._settle_time = settle_time.total_seconds()
        self._lease = lease.total_seconds()
        self._settling_since = self._renewing_since = clock.monotonic()

    def begin(self) -> None:
        """Restart both periods: no response could be recorded and no lease renewed."""
        self._settling_since = self._renewing_since = self._clock.monotonic()

    def begin_settling(self) -> None:
        """Restart the wait for responses: none could arrive, but leases were renewed."""
        self._settling_since = self._clock.monotonic()

    @property
    def may_expire(self) -> bool:
        """Whether queued responses had time to arrive, so that deadlines may be enforced."""
        return self._clock.monotonic() >= self._settling_since + self._settle_time

    @property
    def may_take_over(self) -> bool:
        """Whether owners had time to renew their leases, so that their tasks may be rescued."""
        return self._clock.monotonic() >= self._renewing_since + self._lease
