"""What `meshpoint exec` is given: its input, a duration, the secret keys of its environment."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshpoint.cli.send import MAX_INPUT_BYTES, parse_input
from meshpoint.errors import ConfigurationError
from meshpoint.input_files import read_bounded

if TYPE_CHECKING:
    from meshpoint.exec.session import ExecInput

_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_MAX_DAYS = 3650
"""Days."""


def read_input(text: str | None) -> ExecInput | None:
    """`text` as JSON, or what the file after its @ holds.

    Raises:
        ConfigurationError: it cannot be read, or is no JSON.
    """
    from meshpoint.exec.session import ExecInput

    if text is None:
        return None
    try:
        content = read_bounded(Path(text[1:]), MAX_INPUT_BYTES).decode("utf-8-sig") if text.startswith("@") else text
        return ExecInput(parse_input(content))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "--input", f"{text[1:]} cannot be read: {error}", "name a JSON file after @"
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError("--input", error.problem, error.fix) from error


def parse_duration(text: str) -> timedelta:
    """`text`, such as "12h", as a duration.

    Raises:
        ConfigurationError: it is none.
    """
    found = _DURATION.fullmatch(text)
    duration = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found is not None else timedelta()
    if not timedelta() < duration <= timedelta(days=_MAX_DAYS):
        fix = f"write a number and s, m, h or d, such as 12h, up to {_MAX_DAYS}d"
        raise ConfigurationError("--ttl", f"{text!r} is no duration", fix)
    return duration


def configured_secret_keys() -> list[str]:
    """The secret keys that the environment gives to agents.

    Raises:
        ConfigurationError: they are no list.
    """
    from meshpoint.settings.environment import read_overrides, variable_name

    keys = read_overrides(os.environ).get("agent", {}).get("secret_keys", "[]")
    try:
        return [str(key) for key in json.loads(keys)]
    except (ValueError, TypeError, RecursionError) as error:
        name = variable_name("agent", "secret_keys")
        raise ConfigurationError(name, "is no JSON list", f"""write {name}='["name"]'""") from error
