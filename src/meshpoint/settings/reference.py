"""Generate the tables of `docs/reference/configuration.md` from the settings.

Usage: `python -m meshpoint.settings.reference docs/reference/configuration.md`. The tables replace
the text between the markers in that page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.loading import variable_name
from meshpoint.settings.mesh import MeshSettings

_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("mesh", MeshSettings),
    ("agent", AgentSettings),
)


def render_page(page: str) -> str:
    """Return `page` with the table of each section between its markers."""
    for section, model in _SECTIONS:
        page = replace_section(page, section, _render_table(section, model))
    return page


def replace_section(page: str, section: str, text: str) -> str:
    """Return `page` with `text` between the markers of a generated section."""
    start, end = f"<!-- {section} -->\n", f"<!-- end of {section} -->\n"
    before, rest = page.split(start)
    _, after = rest.split(end)
    return before + start + text + end + after


def _render_table(section: str, model: type[BaseModel]) -> str:
    """Render the keys of one section as a table: default, unit and meaning."""
    lines = ["| Key | Default | Unit | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {_default(field)} | {_unit(key, field)} | {field.description} |"
        for key, field in model.model_fields.items()
    ]
    example = variable_name(section, next(reversed(model.model_fields)))
    return "\n".join([*lines, "", f"A variable such as `{example}` overrides a key.", ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    match value:
        case None:
            return "unset"
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float():
            return f"`{value:g}`" if value < 10_000 else f"`{value:_.0f}`"
        case _:
            return f"`{value}`"


def _unit(key: str, field: FieldInfo) -> str:
    if key.endswith("_seconds"):
        return "seconds"
    if key.endswith("_bytes"):
        return "bytes"
    return "count" if field.annotation is int else ""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(render_page(target.read_text(encoding="utf-8")), encoding="utf-8")
