"""Generate the commands in `docs/reference/cli.md` from the command line.

Usage: `python -m meshpoint.cli.reference docs/reference/cli.md`. They replace the text between the
markers in that page.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from meshpoint.cli.app import app
from meshpoint.settings.reference import replace_section


def render_page(page: str) -> str:
    """Return `page` with all commands between its markers."""
    sections = [
        _section(path, command)
        for path, command in _commands("meshpoint", typer.main.get_command(app))
    ]
    return replace_section(page, "commands", "\n" + "\n".join(sections) + "\n")


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        if hasattr(each, "commands"):
            yield from _commands(f"{path} {name}", each)
        else:
            yield f"{path} {name}", each


def _section(path: str, command: Any) -> str:
    context = typer.Context(command, info_name=path)
    usage = " ".join([path, "[OPTIONS]", *map(_argument, filter(_is_argument, command.params))])
    parts = [f"## {path}\n", f"{_text(command.help)}\n", f"```text\n{usage}\n```\n"]
    rows = [
        _row(each, record[1])
        for each in command.params
        if (record := each.get_help_record(context))
    ]
    if rows:
        parts.append("\n".join(["| Argument or option | Meaning |", "|---|---|", *rows]) + "\n")
    if command.epilog:
        examples = (
            inspect.cleandoc(command.epilog.replace("\b", ""))
            .removeprefix("Examples:")
            .strip("\n")
        )
        parts.append(f"```text\n{inspect.cleandoc(examples)}\n```\n")
    return "\n".join(parts)


# Typer's own usage lines and option names differ between its versions.


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _argument(param: Any) -> str:
    return param.metavar if param.required else f"[{param.metavar}]"


def _name(param: Any) -> str:
    if _is_argument(param):
        return str(param.metavar)
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    return names if param.is_flag else f"{names} {param.metavar}"


def _text(help_: str) -> str:
    """Convert help text to Markdown: names of settings and options become code."""
    return re.sub(
        r"(?<![`\w-])(--[a-z-]+|[a-z]+(?:_[a-z]+)+)(?![`\w])", r"`\1`", inspect.cleandoc(help_)
    )


def _row(param: Any, help_: str) -> str:
    name, meaning = (text.replace("|", r"\|") for text in (_name(param), help_))
    meaning = " ".join(_text(meaning).split()).replace("[", r"\[")  # "[default: 1]" is not a link
    return f"| `{name}` | {meaning} |"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(render_page(target.read_text(encoding="utf-8")), encoding="utf-8")
