"""Check that a restored memory equals the stored one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import Item
from meshpoint.working_memory.digests import item_digests


class ConsistencyVerifier:
    """Compares items with their stored digests, key by key."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = digests

    def verify(self, items: Iterable[Item], label: str) -> None:
        """Check that `items` match the digests exactly.

        Raises:
            ConsistencyError: They do not. The error has `label`, and the keys that are missing,
                extra or changed.
        """
        items = tuple(items)
        found = item_digests(items)
        duplicates = {key for key, count in Counter(item.key for item in items).items() if count > 1}
        if found == self._digests and not duplicates:
            return
        raise ConsistencyError(
            f"{label} differs from its digests",
            missing=sorted(self._digests.keys() - found.keys()),
            extra=sorted(duplicates | (found.keys() - self._digests.keys())),
            changed=sorted(key for key in found.keys() & self._digests.keys() if found[key] != self._digests[key]),
        )
