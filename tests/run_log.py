"""A record of which code ran."""

from __future__ import annotations


class RunLog:
    """Names of the code that ran, in order.

    It is callable so that digests of closures ignore its contents.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.names.append(name)

    def take_new(self) -> list[str]:
        """Names recorded since the previous call."""
        names, self.names = self.names, []
        return names
