"""What `meshpoint dead` says about dead letters, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from pydantic import JsonValue
from pydantic_core import from_json

from meshpoint.cli.output import format_age
from meshpoint.cli.task_facts import shorten
from meshpoint.model.dead_letters import DeadLetter, LetterResult
from meshpoint.model.error_text import quantity
from meshpoint.model.secrets import mask_secrets, remove_secrets

_DONE = LetterResult.DONE
_UNREADABLE = "(unreadable)"
_MAX_JSON_TEXT = 100_000
"""Maximum characters of a body that is not JSON. `--raw` does not cut it."""

GROUP_COLUMNS = ("agent", "letters", "sender", "oldest", "newest", "newest id", "reason")
LETTER_COLUMNS = ("letter", "type", "sender", "sent", "queue", "reason")


@dataclass(slots=True)
class LetterGroup:
    """Dead letters of one agent with the same reason and sender, or all its unreadable ones.

    `oldest` and `newest` are the times at which their senders sent them, where known.
    """

    agent: str
    reason: str
    sender: str | None
    readable: bool
    count: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None
    newest_id: str = ""

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        self.count += 1
        self.newest_id = letter.id
        sent = sent_at(letter)
        if sent is not None:
            self.oldest = min(filter(None, (self.oldest, sent)))
            self.newest = max(filter(None, (self.newest, sent)))

    def to_json(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return all facts, with secrets in the reason masked."""
        return {
            "agent": self.agent,
            "reason": mask_secrets(self.reason, keys),
            "sender": self.sender,
            "readable": self.readable,
            "count": self.count,
            "oldest": self.oldest,
            "newest": self.newest,
            "newest_id": self.newest_id,
        }

    def to_row(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return a row of a table with `GROUP_COLUMNS`."""
        return (
            self.agent,
            str(self.count),
            self.sender if self.sender is not None else _UNREADABLE,
            _age(self.oldest),
            _age(self.newest),
            self.newest_id,
            mask_secrets(self.reason, keys),
        )


class LetterGroups:
    """Groups letters as they are read."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str | None, bool], LetterGroup] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count a letter in its group."""
        readable = letter.message is not None
        key = (letter.agent, letter.reason, letter.sender, readable)
        group = self._groups.setdefault(key, LetterGroup(*key))
        group.add(letter)

    def largest_first(self) -> list[LetterGroup]:
        """Return all groups by agent, each agent's largest first."""
        return sorted(
            self._groups.values(), key=lambda each: (each.agent, -each.count, each.reason)
        )


def sent_at(letter: DeadLetter) -> datetime | None:
    """When the message was sent, if it says so."""
    return None if letter.message is None else letter.message.timestamp


def letter_row(letter: DeadLetter, keys: Sequence[str]) -> tuple[str, ...]:
    """Return a letter as a row of a table with `LETTER_COLUMNS`."""
    return (
        letter.id,
        "-" if letter.message is None else letter.message.type.value,
        letter.sender if letter.sender is not None else _UNREADABLE,
        _age(sent_at(letter)),
        letter.queue or "-",
        mask_secrets(letter.reason, keys),
    )


def letter_to_json(letter: DeadLetter, keys: Sequence[str]) -> dict[str, Any]:
    """Return a letter without its body. Secrets in its headers are null, others masked."""
    return {
        "id": letter.id,
        "agent": letter.agent,
        "queue": letter.queue,
        "reason": mask_secrets(letter.reason, keys),
        "readable": letter.message is not None,
        "defect": letter.defect and mask_secrets(letter.defect, keys),
        "deliveries": letter.deliveries,
        "properties": {
            name: _show_property(value, keys) for name, value in letter.properties.items()
        },
        "body_bytes": letter.body_size,
    }


def describe_letter(
    letter: DeadLetter, body: bytes | None, keys: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the facts about a letter, as rows of a table."""
    shown = letter_to_json(letter, keys)
    replay = letter.defect and f"impossible: {mask_secrets(letter.defect, keys)}"
    facts: list[tuple[str, str | None]] = [
        ("agent", letter.agent),
        ("queue", letter.queue),
        ("reason", shown["reason"]),
        ("replay", replay),
        ("deliveries", str(letter.deliveries) if letter.deliveries else None),
    ]
    properties = dict(shown["properties"])
    headers = properties.pop("headers", {})
    for name, value in properties.items():
        facts.append((name.replace("_", " "), shorten(str(value), keys)))
    if isinstance(headers, dict):
        facts += [(name, shorten(str(value), keys)) for name, value in headers.items()]
    else:
        facts.append(("headers", shorten(str(headers), keys)))
    facts.append(("body", _describe_body(letter, body, keys)))
    return [(name, fact) for name, fact in facts if fact is not None]


def show_body(body: bytes | None, keys: Sequence[str]) -> JsonValue:
    """Return a body as JSON with secrets set to null, or as masked text; `None` without one."""
    if body is None:
        return None
    try:
        return remove_secrets(from_json(body), (), keys)[0]
    except ValueError:
        text = body[: 4 * _MAX_JSON_TEXT].decode("utf-8", "backslashreplace")
        return mask_secrets(text[:_MAX_JSON_TEXT], keys)


def results_to_json(results: Counter[LetterResult], verb: str) -> dict[str, object]:
    """Return the number of letters with each result."""
    others = {each.name.lower(): results[each] for each in LetterResult if each is not _DONE}
    return {verb: results[_DONE], **others}


def _describe_body(letter: DeadLetter, body: bytes | None, keys: Sequence[str]) -> str:
    size = quantity(letter.body_size, "byte")
    if body is None:
        return "too large to load, or not binary"
    return f"({size}) {shorten(show_body(body, keys), keys)}" if body else "(empty)"


def _show_property(value: object, keys: Sequence[str]) -> object:
    """Return a property with secrets masked, as a value that JSON can express."""
    match value:
        case dict():
            readable = {str(name): _show_property(each, keys) for name, each in value.items()}
            return remove_secrets(cast("JsonValue", readable), (), keys)[0]
        case datetime():
            return value.isoformat()
        case str():
            return mask_secrets(value, keys)
        case bool() | int() | float():
            return value
        case _:
            return mask_secrets(repr(value), keys)


def _age(instant: datetime | None) -> str:
    return "-" if instant is None else f"{format_age(instant)} ago"
