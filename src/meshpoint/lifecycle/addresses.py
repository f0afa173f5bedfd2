"""Addresses that did not take a message lately, so that they are tried apart, and less and less often."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshpoint.model.messages import Address
from meshpoint.ports.clock import Clock

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds."""
_MOST = 10_000
"""Addresses that are remembered; the oldest are forgotten, and tried at once."""


@dataclass(slots=True)
class _Trouble:
    failed_at: float
    pause: float
    gone: bool
    slow: bool


class Addresses:
    """A back-off for each address."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._troubles: OrderedDict[Address, _Trouble] = OrderedDict()

    def blocked(self, address: Address, *, fresh: bool = False) -> bool:
        """Whether it is not to be tried yet.

        With what is `fresh`, an address that answers at once is tried again soon: its queue may be there by now.
        """
        trouble = self._troubles.get(address)
        if trouble is None:
            return False
        pause = _FIRST_PAUSE if fresh and not trouble.slow else trouble.pause
        return self._clock.monotonic() < trouble.failed_at + pause

    def troubled(self, address: Address) -> bool:
        """Whether it did not take the last message."""
        return address in self._troubles

    def gone(self, address: Address) -> bool:
        """Whether there was no such queue when it was tried last."""
        trouble = self._troubles.get(address)
        return trouble is not None and trouble.gone

    def failed(self, address: Address, *, began: float, gone: bool, slow: bool) -> None:
        """Note that it did not take a message that was published when it `began`, or that there is no such queue.

        `slow`: it made the sender wait for that.
        """
        before = self._troubles.pop(address, None)
        now = self._clock.monotonic()
        pause = _FIRST_PAUSE if before is None else before.pause
        if before is not None and began >= before.failed_at + before.pause:  # not one of several tried at a time
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._troubles[address] = _Trouble(now, pause, gone, slow)
        if len(self._troubles) > _MOST:
            self._troubles.popitem(last=False)

    def worked(self, address: Address) -> None:
        """Note that it took a message."""
        self._troubles.pop(address, None)
