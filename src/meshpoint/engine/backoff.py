"""Back-off for addresses that recently failed to accept a message."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshpoint.model.messages import Address
from meshpoint.ports.clock import Clock

_INITIAL_DELAY, _MAX_DELAY = 1.0, 30.0
"""Seconds of the first and the longest back-off."""
_MAX_ADDRESSES = 10_000
"""Maximum number of addresses tracked. The oldest are dropped and tried at once."""


@dataclass(slots=True)
class _Failure:
    failed_at: float
    delay: float
    queue_missing: bool
    slow: bool
    unconfirmed: bool


class AddressBackoff:
    """Tracks a back-off for each address."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failure_by_address: OrderedDict[Address, _Failure] = OrderedDict()

    def is_blocked(self, address: Address, *, fresh: bool = False) -> bool:
        """Whether the address is in back-off.

        A `fresh` message is tried soon if the address fails fast, since its queue may exist by
        now.
        """
        failure = self._failure_by_address.get(address)
        if failure is None:
            return False
        delay = _INITIAL_DELAY if fresh and not failure.slow else failure.delay
        return self._clock.monotonic() < failure.failed_at + delay

    def is_failing(self, address: Address) -> bool:
        """Whether the address failed to accept the last message."""
        return address in self._failure_by_address

    def is_unconfirmed(self, address: Address) -> bool:
        """Whether the last attempt got no confirmation. The broker may only be slow."""
        failure = self._failure_by_address.get(address)
        return failure is not None and failure.unconfirmed

    def is_queue_missing(self, address: Address) -> bool:
        """Whether the queue did not exist at the last attempt."""
        failure = self._failure_by_address.get(address)
        return failure is not None and failure.queue_missing

    def record_failure(
        self,
        address: Address,
        *,
        started_at: float,
        queue_missing: bool = False,
        slow: bool = True,
        unconfirmed: bool = False,
    ) -> None:
        """Record that a message published at `started_at` was not accepted.

        `queue_missing`: its queue is missing. `slow`: the sender had to wait. `unconfirmed`: the
        broker has not answered yet.
        """
        previous = self._failure_by_address.pop(address, None)
        now = self._clock.monotonic()
        delay = _INITIAL_DELAY if previous is None else previous.delay
        # Count concurrent attempts once.
        if previous is not None and started_at >= previous.failed_at + previous.delay:
            delay = min(2 * delay, _MAX_DELAY)
        self._failure_by_address[address] = _Failure(now, delay, queue_missing, slow, unconfirmed)
        if len(self._failure_by_address) > _MAX_ADDRESSES:
            self._failure_by_address.popitem(last=False)

    def record_success(self, address: Address) -> None:
        """Record that the address accepted a message."""
        self._failure_by_address.pop(address, None)
