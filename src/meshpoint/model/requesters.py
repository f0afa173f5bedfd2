"""Compare requesters, and early cancels with requests, by the names that stores keep."""

from __future__ import annotations

_MOST_CANCELLERS = 8
_SEPARATOR = "\n"  # cannot occur in a name, since names are printable


def same_requester(known: str | None, other: str | None) -> bool:
    """Whether two requesters are the same. `None` is unknown and matches any."""
    return None in (known, other) or known == other


def same_input(known: str | None, other: str | None) -> bool:
    """Whether two input digests are the same. `None` is unknown and matches any."""
    return None in (known, other) or known == other


def binds(cancellers: str | None, requester: str | None) -> bool:
    """Whether an early cancel applies to a request from `requester`; `None` matches any."""
    return cancellers is None or requester is None or requester in cancellers.split(_SEPARATOR)


def with_canceller(cancellers: str | None, canceller: str | None) -> str | None:
    """Add a canceller to `cancellers`; `None` matches any requester."""
    if cancellers is None or canceller is None:
        return None
    names = cancellers.split(_SEPARATOR)
    return cancellers if canceller in names else _SEPARATOR.join([*names, canceller][-_MOST_CANCELLERS:])
