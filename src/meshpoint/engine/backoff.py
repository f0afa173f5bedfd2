"""Back-off for addresses that recently failed to accept a message."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshpoint.model.messages import Address
from meshpoint.ports.clock import Clock

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds of the first and the longest back-off."""
_MOST = 10_000
"""Maximum number of addresses tracked. The oldest are dropped and tried at once."""


@dataclass(slots=True)
class _Trouble:
    failed_at: float
    pause: float
    gone: bool
    slow: bool
    silent: bool


class Addresses:
    """Tracks a back-off for each address."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._troubles: OrderedDict[Address, _Trouble] = OrderedDict()

    def blocked(self, address: Address, *, fresh: bool = False) -> bool:
        """Whether the address is in back-off.

        A `fresh` message is tried soon if the address fails fast, since its queue may exist by
        now.
        """
        trouble = self._troubles.get(address)
        if trouble is None:
            return False
        pause = _FIRST_PAUSE if fresh and not trouble.slow else trouble.pause
        return self._clock.monotonic() < trouble.failed_at + pause

    def troubled(self, address: Address) -> bool:
        """Whether the address failed to accept the last message."""
        return address in self._troubles

    def silent(self, address: Address) -> bool:
        """Whether the last attempt got no confirmation. The broker may only be slow."""
        trouble = self._troubles.get(address)
        return trouble is not None and trouble.silent

    def gone(self, address: Address) -> bool:
        """Whether the queue did not exist at the last attempt."""
        trouble = self._troubles.get(address)
        return trouble is not None and trouble.gone

    def failed(
        self, address: Address, *, began: float, gone: bool = False, slow: bool = True, silent: bool = False
    ) -> None:
        """Record that a message published at `began` was not accepted.

        `gone`: its queue is missing. `slow`: the sender had to wait. `silent`: the broker has not
        answered yet.
        """
        before = self._troubles.pop(address, None)
        now = self._clock.monotonic()
        pause = _FIRST_PAUSE if before is None else before.pause
        # Count concurrent attempts once.
        if before is not None and began >= before.failed_at + before.pause:
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._troubles[address] = _Trouble(now, pause, gone, slow, silent)
        if len(self._troubles) > _MOST:
            self._troubles.popitem(last=False)

    def worked(self, address: Address) -> None:
        """Record that the address accepted a message."""
        self._troubles.pop(address, None)
