"""How pages show values: masked, bounded, and times that the browser keeps current."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import JsonValue

from meshpoint.model.error_text import escape_unprintable, quantity
from meshpoint.model.ids import AgentName
from meshpoint.model.operator_views import TreeNode
from meshpoint.model.questions import QuestionKey
from meshpoint.model.secrets import mask_secrets, remove_secrets
from meshpoint.model.timeline import describe, format_duration
from meshpoint.model.waits import display_name, wait_kind

_MAX_TEXT = 20_000
_MAX_REASON = 300
_CHANGING = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{12,}\b|\d+",
    re.IGNORECASE,
)


class Masks:
    """Masks secrets in what a mesh stores, by the same rules as the command line."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    def text(self, text: str | None, limit: int = _MAX_TEXT) -> str:
        """A text without secrets, cut if it is long."""
        if text is None:
            return ""
        masked = escape_unprintable(mask_secrets(text[: 2 * limit], self._keys), allowed="\n\t")
        return masked if len(masked) <= limit else f"{masked[:limit]}…"

    def json(self, value: JsonValue) -> str:
        """A value as indented JSON without secrets, cut if it is long."""
        shown = remove_secrets(value, (), self._keys)[0]
        return self.text(json.dumps(shown, indent=2, ensure_ascii=False))

    def items(self, values: Mapping[str, JsonValue]) -> dict[str, str]:
        """The values of a task as JSON, each without secrets."""
        shown = remove_secrets(dict(values), (), self._keys)[0]
        pairs = shown.items() if isinstance(shown, dict) else ()
        return {key: self.json(value) for key, value in pairs}

    def reason(self, reason: str | None) -> str:
        """Why something happened, on a line."""
        return self.text(reason or "unknown", _MAX_REASON).replace("\n", " ")


def common_part(reason: str) -> str:
    """What reasons have in common that differ in ids and numbers."""
    return _CHANGING.sub("#", reason.partition("\n")[0])[:_MAX_REASON]


def group_id(*values: str | None) -> str:
    """An opaque name of a group whose members share these values."""
    return sha256(json.dumps(values).encode()).hexdigest()[:32]


def make_environment() -> Environment:
    """Create the environment of the templates."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": lambda at: _time(at, "ago"),
        "age": lambda at: _time(at, "age"),
        "left": lambda at: _time(at, "left"),
        "short": _short,
        "peer": display_name,
        "kind": wait_kind,
        "quantity": quantity,
        "duration": format_duration,
        "details": describe,
    }
    environment.globals |= {"question_id": _question_id}
    return environment


def _question_id(agent: AgentName, call: TreeNode) -> str:
    """The id of a question in a tree, which its task of `agent` waits for."""
    assert call.parent_id is not None
    return QuestionKey(agent, call.parent_id, call.task_id).to_id()


def _time(at: datetime | None, kind: str) -> Markup | str:
    """A time that the browser shows relative to now, and without scripts as it is."""
    if at is None:
        return "–"
    exact = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" data-kind="{}" title="{}">{}</time>').format(
        at.astimezone(UTC).isoformat(), kind, exact, exact
    )


def _short(id_: str) -> str:
    """The end of a long id, which differs from others of the same time."""
    return id_ if len(id_) <= 18 else f"{id_[:8]}…{id_[-8:]}"
