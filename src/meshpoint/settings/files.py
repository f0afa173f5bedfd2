"""Read YAML files as plain mappings, replacing `${VAR}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.files import read_bounded

_MAX_FILE_BYTES = 1024 * 1024  # PyYAML needs about 10 s and 400 MB for a file of this size

_VARIABLE_REFERENCE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{\s*(?P<name>[A-Za-z_]\w*)\s*(?:,(?P<default>[^}]*))?\}|(?P<broken>\$\{)"
)


def read(path: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections of one file, with variables replaced.

    Top-level keys that start with `x-` are left out: they can hold YAML anchors.

    Raises:
        ConfigurationError: PyYAML is missing, or the file cannot be read, is not a YAML mapping,
            repeats a key, or names a variable that is not set.
    """
    extras.YAML.require(str(path))
    from meshpoint.settings.strict_yaml import parse

    content = parse(_text(path), str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            str(path), "is not a mapping", "start it with the line 'mesh:' or 'agent:'"
        )
    sections = {str(key): value for key, value in content.items() if not str(key).startswith("x-")}
    return {key: _interpolate(value, env, f"{path}: {key}") for key, value in sections.items()}


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_FILE_BYTES).decode()
    except OSError as error:
        problem = error.strerror or type(error).__name__
        problem = problem[:1].lower() + problem[1:]
        raise ConfigurationError(str(path), problem, "name a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(str(path), "is not UTF-8", "save it as UTF-8") from error


def _interpolate(value: Any, env: Mapping[str, str], key: str) -> Any:
    """Replace each `${VAR}` and `${VAR, default}` in the strings of `value`. `$${` becomes `${`.

    A variable that is set takes precedence over the default, even if it is empty.

    Raises:
        ConfigurationError: A variable without default is not set. The message names it and the key
            that uses it.
    """
    match value:
        case str():
            return _VARIABLE_REFERENCE.sub(
                lambda reference: _resolve_reference(reference, env, key), value
            )
        case dict():
            return {name: _interpolate(item, env, f"{key}.{name}") for name, item in value.items()}
        case list():
            return [_interpolate(item, env, f"{key}[{index}]") for index, item in enumerate(value)]
        case _:
            return value


def _resolve_reference(reference: re.Match[str], env: Mapping[str, str], key: str) -> str:
    if reference["escaped"]:
        return "${"
    if reference["broken"]:
        raise ConfigurationError(
            key, "has a '${' without a variable name", "write ${NAME} or ${NAME, default}"
        )
    name, default = reference["name"], reference["default"]
    value = env.get(name, None if default is None else default.strip())
    if value is None:
        raise ConfigurationError(
            key, f"the variable {name} is not set", f"export {name}, or write ${{{name}, default}}"
        )
    return value
