"""The dead letters of a mesh: read, replayed and dropped by operators.

All methods raise `Unavailable` if the server cannot be reached, and `ConfigurationError` if it
refuses the login or the URL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult


class DeadLetters(Protocol):
    """The dead letters of all agents of a mesh.

    Several processes may use them at once, while replicas run. No two of them replay or drop the
    same letter.
    """

    async def open(self) -> None:
        """Connect. Nothing is created."""

    async def close(self) -> None:
        """Disconnect."""

    def read(self, where: LetterFilter) -> AsyncGenerator[Sequence[DeadLetter], None]:
        """Yield the letters that match in pages of one agent each, its oldest first.

        Letters that arrive after the call, such as replayed ones that died again, are not among
        them. Close the generator: until then, a broker may hide the letters from other processes.
        """

    async def body(self, letter: DeadLetter) -> bytes | None:
        """The body of a letter of the page that `read` yielded last.

        `None` if the letter is gone, or its body is too large to load or is not binary.
        """

    async def replay(
        self, letters: Sequence[DeadLetter], body: bytes | None = None
    ) -> list[LetterResult]:
        """Move letters of the page that `read` yielded last to the queues they came from.

        There they count as never delivered. A failure in between leaves each letter in exactly one
        queue; see the broker for exceptions.

        Args:
            letters: distinct letters.
            body: replaces their bodies.

        Returns:
            The result for each letter, in order.
        """

    async def drop(self, letters: Sequence[DeadLetter]) -> list[LetterResult]:
        """Delete letters of the page that `read` yielded last. Results as for `replay`."""
