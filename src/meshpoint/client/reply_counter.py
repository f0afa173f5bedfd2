"""Count repeated replies. Tests and the demo check that the mesh sends none without need."""

from __future__ import annotations

from hashlib import blake2b

from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import encode_outcome

_MAX_TASKS = 10_000
"""Number of tasks whose replies are remembered."""
_MAX_DIGESTS = 8
"""Number of different replies remembered for a task."""


class ReplyCounter:
    """Counts the replies after the first of each task; the `on_response` of a `Transport`.

    Attributes:
        duplicates: Replies equal to an earlier one, which was sent again.
        conflicts: Replies with another content.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self.conflicts = 0
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._digests: dict[tuple[str, str], set[bytes]] = {}

    def expect(self, agent: str, task_id: str, fingerprint: str | None = None) -> None:
        """Count from the next reply on. `fingerprint` names the request, for refusals of it."""
        self._digests.pop((agent, task_id), None)
        if fingerprint is not None:
            self._fingerprints[agent, task_id] = fingerprint
            _drop_oldest(self._fingerprints)

    def __call__(self, message: Message) -> None:
        """Count `message`, a response."""
        key = message.app_id, message.correlation_id
        try:
            body = parse_body(ResponseBody, message.body)
            outcome = body.outcome()
        except PoisonMessage:
            return
        refused = body.refused_fingerprint
        if refused is not None and refused != self._fingerprints.get(key):
            return  # another sender's request, or an unannounced request
        digest = blake2b(encode_outcome(outcome), digest_size=16).digest()
        if (known := self._digests.get(key)) is None:
            self._digests[key] = {digest}
            _drop_oldest(self._digests)
        elif digest in known:
            self.duplicates += 1
        else:
            self.conflicts += 1
            if len(known) < _MAX_DIGESTS:  # it may be repeated too
                known.add(digest)


def _drop_oldest(values: dict[tuple[str, str], str] | dict[tuple[str, str], set[bytes]]) -> None:
    if len(values) > _MAX_TASKS:
        del values[next(iter(values))]
