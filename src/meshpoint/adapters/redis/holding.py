"""Parsing of the replies that contain a memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpoint.adapters.redis.script_calls import ScriptReply
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Content, Held, Item, Kind


def parse_contents(replies: Sequence[ScriptReply]) -> Held | None:
    """The content of a memory, from the replies for consecutive ranks of its index.

    Returns `None` if the memory was written between these replies, or if they do not cover all
    keys. Keys that expired before the last reply are left out.
    """
    state, _, run_id, fence, version, total, _ = replies[-1]
    now = max(reply[1] for reply in replies)
    if any([reply[0], *reply[2:6]] != [state, run_id, fence, version, total] for reply in replies):
        return None
    if state != b"ok":
        return Held((), version, now)
    entries = [entry for reply in replies for entry in reply[6]]
    if len(entries) != total - 1:  # the index also has a member that is not a key
        return None
    items, lost, large = [], [], []
    for key, score, kind, *content in entries:
        name, ends = decode_name(key), float(score)
        if ends <= now:
            continue
        if kind == b"large":
            large.append(name)
        elif not content:
            lost.append(name)
        else:
            expires_at = None if ends == float("inf") else int(ends)
            items.append(Item(name, Kind(kind.decode()), _CONTENT_FROM_REPLY[kind](content[0]), expires_at))
    run = RunId(decode_name(run_id))
    return Held(tuple(items), version, now, run, int(fence), tuple(lost), tuple(large))


def decode_name(key: bytes) -> str:
    """The name of a key. Bytes that are not UTF-8 are escaped."""
    return key.decode(errors="backslashreplace")


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: Sequence[bytes]) -> dict[bytes, float]:
    # Redis keeps the sign of -0.0 only in large sorted sets. Here it is always 0.0.
    return {member: float(score) + 0.0 for member, score in _pairs(flat).items()}


_CONTENT_FROM_REPLY: Mapping[bytes, Callable[[Any], Content]] = {
    b"string": bytes,
    b"list": tuple,
    b"hash": _pairs,
    b"set": frozenset,
    b"zset": _scores,
}
