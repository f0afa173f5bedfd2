"""Translate validation errors of pydantic into one line with the key and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from meshpoint.errors import ConfigurationError
from meshpoint.model.typed import cause_of, first_problem, has_too_many

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

AnyModel = TypeVar("AnyModel", bound=BaseModel)

_MIN_SIMILARITY = 0.6
"""Similarity, from 0 to 1, above which a known key is suggested."""
_MAX_SHOWN_CHARACTERS = 60


def build_section(model: type[AnyModel], values: Any, names: Mapping[str, str], label: str) -> AnyModel:
    """Validate `values` as `model`.

    Args:
        label: Name of the section in messages.
        names: Names in messages for keys that were set elsewhere, such as by a variable.

    Raises:
        ConfigurationError: The first problem found. Unknown keys come first, since a misspelt key
            is both unknown and missing.
    """
    if not isinstance(values, dict):
        raise ConfigurationError(label, "has no keys", f"write 'key: value' lines below it, or remove {label!r}")
    for key in values:
        if key not in model.model_fields:
            where = names.get(str(key), f"{label}.{key}")
            raise unknown_key(where, str(key), model.model_fields)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _translate(error, model, names, label) from cause_of(error)


def unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown `key`, with the most similar known key."""
    known = sorted(known)
    nearest = get_close_matches(key.lower(), known, n=1, cutoff=_MIN_SIMILARITY)
    fix = f"did you mean {nearest[0]!r}?" if nearest else f"known keys are {', '.join(known)}"
    return ConfigurationError(where, "is not a known key", fix)


def _translate(
    error: ValidationError, model: type[BaseModel], names: Mapping[str, str], label: str
) -> ConfigurationError:
    if has_too_many(error):
        return ConfigurationError(label, first_problem(error), "correct it")
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    where = names.get(key, f"{label}.{key}" if key else label)
    meaning = model.model_fields[key].description if key in model.model_fields else None
    unit = ", in seconds" if key.endswith("_seconds") else ""
    fix = f"meaning: {meaning}{unit}" if meaning else "correct it"
    if first["type"] == "missing":
        return ConfigurationError(where, "is missing", f"add it; {fix}")
    return ConfigurationError(where, _problem(first, key), fix)


def _problem(error: ErrorDetails, key: str) -> str:
    message = error["msg"].partition(", unable to parse")[0].replace("Input should be", "must be")
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    message = message[:1].lower() + message[1:]
    shown = repr(error["input"])
    if key.endswith("_url") or len(shown) > _MAX_SHOWN_CHARACTERS:
        return message  # a URL may contain a password
    return f"{message}, not {shown}"
