"""`database_url`, the short key for the three keys that store an agent's tasks in a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshpoint.errors import ConfigurationError
from meshpoint.settings import urls

SHORT_KEY = "database_url"
LONG_KEYS = ("stateless_checkpointing", "session_service", "session_db_url")
_BOOLEAN = TypeAdapter(bool)


def expand(url: str) -> dict[str, Any]:
    """Return the long keys that `database_url: url` stands for."""
    return dict(zip(LONG_KEYS, (True, "sql", url), strict=True))


def expand_section(values: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Return `values` of one section, with the long keys that their `database_url` stands for.

    Values that are invalid by themselves are left to the validation of their key.

    Args:
        values: What the section contains.
        name: Returns the name of a key in messages.

    Raises:
        ConfigurationError: The URL cannot be used, or a long key in `values` disagrees with it.
    """
    url = values.get(SHORT_KEY)
    if not isinstance(url, str):
        return dict(values)
    expanded = expand(urls.database_url(url, name(SHORT_KEY)))
    for key in LONG_KEYS:
        if key in values:
            _check_agreement(key, values[key], expanded[key], name)
    return {**expanded, **values}


def _check_agreement(key: str, value: Any, expected: Any, name: Callable[[str], str]) -> None:
    short = name(SHORT_KEY)
    match key, value:
        case "session_db_url", str():
            if urls.database_url(value, name(key)) != expected:
                problem = f"names another database than {short}"
                raise ConfigurationError(name(key), problem, f"remove {key} or {SHORT_KEY}")
        case "session_service", "memory":
            fix = f"remove {SHORT_KEY}, or {key}"
            raise ConfigurationError(name(key), f"memory contradicts {short}", fix)
        case "stateless_checkpointing", _ if _is_false(value):
            fix = (
                f"remove {key}, or replace {SHORT_KEY} with session_service: sql and "
                "session_db_url: URL"
            )
            raise ConfigurationError(name(key), f"false contradicts {short}", fix)


def _is_false(value: Any) -> bool:
    try:
        return not _BOOLEAN.validate_python(value)
    except ValidationError:
        return False


@dataclass(frozen=True, slots=True)
class Layer:
    """The keys of an agent from one place: its file or its variables."""

    values: Mapping[str, Any]
    name: Callable[[str], str]
    """Returns the name of a key in messages."""


def merge_layers(
    mesh_url: str | None, mesh_name: str, layers: Sequence[Layer]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the keys of one agent, with each `database_url` expanded.

    A long key takes precedence over each `database_url` below it. `session_service: memory`
    revokes all that a `database_url` below it stands for.

    Args:
        mesh_url: The `database_url` of the mesh, which is below all layers.
        mesh_name: The name of that key in messages.
        layers: Lowest first.

    Returns:
        The keys, and for each long key that comes from a `database_url`, the name of the latter.

    Raises:
        ConfigurationError: A `database_url` is empty, or as for `expand_section`.
    """
    merged = {} if mesh_url is None else expand(mesh_url)
    origins = dict.fromkeys(merged, mesh_name)
    for index, layer in enumerate(layers):
        values, name = dict(layer.values), layer.name
        if any(SHORT_KEY in later.values for later in layers[index + 1 :]):
            values.pop(SHORT_KEY, None)
        check_not_empty(values, name(SHORT_KEY))
        if any(key in values for key in LONG_KEYS):
            merged.pop(SHORT_KEY, None)
        if values.get("session_service") == "memory":
            merged = {key: value for key, value in merged.items() if key not in origins}
            origins.clear()
        expanded = expand_section(values, name)
        origins |= dict.fromkeys(expanded.keys() - values.keys(), name(SHORT_KEY))
        origins = {key: origin for key, origin in origins.items() if key not in values}
        merged |= expanded
    return merged, origins


def check_not_empty(values: Mapping[str, Any], name: str) -> None:
    """Refuse a `database_url` without a value, which YAML reads as null.

    Raises:
        ConfigurationError: `values` has one; the message calls it `name`.
    """
    if SHORT_KEY in values and values[SHORT_KEY] is None:
        fix = "use postgresql://user@host/name, or remove the key"
        raise ConfigurationError(name, "is empty", fix)
