"""Typed access to the outcomes of a pause."""

from __future__ import annotations

from typing import Any, TypeVar

from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentMisbehaved, PeerFailed
from meshpoint.model.outcomes import Failed, Ok, Outcomes

T = TypeVar("T")


class Replies(Outcomes):
    """One outcome per call, by the key given to `ask`, in call order.

    `replies["flight"]` is the outcome as received, with its value as JSON. The methods return
    typed values.
    """

    def outcome(self, key: str, peer: Peer[Any, T]) -> Ok[T] | Failed:
        """Return the typed outcome of a call to `peer`.

        A value that does not fit the peer's output becomes `Failed(INVALID)`.

        Raises:
            AgentMisbehaved: No call has this key.
        """
        if key not in self:
            raise AgentMisbehaved(f"this pause has no call {key!r}; it has {', '.join(map(repr, self))}")
        return peer.read(self[key])

    def value(self, key: str, peer: Peer[Any, T]) -> T:
        """Return the typed result of a call to `peer`.

        Raises:
            PeerFailed: The call has no result. If not caught, this fails the task with the peer's
                message.
            AgentMisbehaved: No call has this key.
        """
        outcome = self.outcome(key, peer)
        if isinstance(outcome, Failed):
            raise PeerFailed(peer.name, outcome)
        return outcome.value

    @property
    def failed(self) -> dict[str, Failed]:
        """The calls without a result, in call order."""
        return {key: outcome for key, outcome in self.items() if isinstance(outcome, Failed)}
