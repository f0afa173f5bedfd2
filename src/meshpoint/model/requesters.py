"""Whose a task is, and which early cancels bind a request: names as the stores keep them."""

from __future__ import annotations

_MOST_CANCELLERS = 8
_SEPARATOR = "\n"  # in no name: names are printable


def same_requester(known: str | None, other: str | None) -> bool:
    """Whether two requests come from one requester. `None` is not known, and is compared with nothing."""
    return None in (known, other) or known == other


def same_input(known: str | None, other: str | None) -> bool:
    """Whether two digests are of one input. `None` is not known, and is compared with nothing."""
    return None in (known, other) or known == other


def binds(cancellers: str | None, requester: str | None) -> bool:
    """Whether a cancel that came before its request is of this requester; `None` binds every request."""
    return cancellers is None or requester is None or requester in cancellers.split(_SEPARATOR)


def with_canceller(cancellers: str | None, canceller: str | None) -> str | None:
    """`cancellers` and one more, who may be anybody (`None`)."""
    if cancellers is None or canceller is None:
        return None
    names = cancellers.split(_SEPARATOR)
    return cancellers if canceller in names else _SEPARATOR.join([*names, canceller][-_MOST_CANCELLERS:])
