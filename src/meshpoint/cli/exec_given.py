"""Parse what `meshpoint exec` is given: its input, durations, and secret keys."""

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


def read_input(text: str | None) -> ExecInput | None:
    """Parse `text` as JSON. After an @, it names a file to read.

    Raises:
        ConfigurationError: It cannot be read or is not JSON.
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
    """Parse a duration such as "12h".

    Raises:
        ConfigurationError: It is not a valid duration.
    """
    found = _DURATION.fullmatch(text)
    duration = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found is not None else timedelta()
    if not timedelta() < duration <= timedelta(days=_MAX_DAYS):
        fix = f"write a number and s, m, h or d, such as 12h, up to {_MAX_DAYS}d"
        raise ConfigurationError("--ttl", f"{text!r} is not a valid duration", fix)
    return duration


def configured_secret_keys() -> list[str]:
    """Return the secret keys that the environment configures for agents.

    Raises:
        ConfigurationError: The variable is not a JSON list.
    """
    from meshpoint.settings.environment import read_overrides, variable_name

    keys = read_overrides(os.environ).get("agent", {}).get("secret_keys", "[]")
    try:
        return [str(key) for key in json.loads(keys)]
    except (ValueError, TypeError, RecursionError) as error:
        name = variable_name("agent", "secret_keys")
        raise ConfigurationError(name, "is not a JSON list", f"""write {name}='["name"]'""") from error
