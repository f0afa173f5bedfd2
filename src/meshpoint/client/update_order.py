"""Keep the updates of one task in order: drop duplicates and late updates of outdated runs."""

from __future__ import annotations

from collections import OrderedDict

from meshpoint.model.status_metadata import StatusMetadata, StatusNumber

_MAX_ORIGINS = 1000
"""Maximum tasks whose last number is kept: the task itself and its peers'."""


class UpdateOrder:
    """The number of the latest update of a task, and of each peer's task below it."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, StatusNumber] = OrderedDict()

    def accept(self, metadata: StatusMetadata) -> bool | None:
        """Whether an update begins a run that repeats an earlier one; `None` if it is outdated.

        An update without a number is never outdated.
        """
        if (number := metadata.number) is None:
            return False
        origin = metadata.origin
        latest = self._latest.get(origin)
        repeats = False
        if latest is not None and number.run == latest.run:
            if number.position <= latest.position:
                return None
        elif latest is not None:
            if not number.is_of_later_run(latest):
                return None
            repeats = number.generation <= latest.generation
        self._latest[origin] = number
        self._latest.move_to_end(origin)
        if len(self._latest) > _MAX_ORIGINS:
            self._latest.popitem(last=False)
        return repeats
