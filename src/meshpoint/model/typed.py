"""Convert values of a declared type to JSON and back."""

from __future__ import annotations

import json
from typing import Any, Generic, TypeVar

from pydantic import JsonValue, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError, to_json

from meshpoint.errors import ConfigurationError, MeshpointError, NotJson
from meshpoint.model.json_values import check_json, without_iterators

T = TypeVar("T")


_MOST_ERRORS = 1000


class DoesNotFit(MeshpointError):
    """A value does not match the declared type. The message names the type and the field."""


class Typed(Generic[T]):
    """A declared type: pydantic model, dataclass, TypedDict, builtin, or any `TypeAdapter`.

    Raises:
        ConfigurationError: pydantic cannot handle the type; `key` says where it was declared.
    """

    def __init__(self, declared: Any, key: str) -> None:
        try:
            self._adapter: TypeAdapter[T] = declared if isinstance(declared, TypeAdapter) else TypeAdapter(declared)
        except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError) as error:
            problem = f"{_name(declared)} cannot become JSON: {str(error).splitlines()[0]}"
            raise ConfigurationError(key, problem, "use a pydantic model, a dataclass or a builtin type") from error
        self.name = _name(declared)

    def read(self, value: object) -> T:
        """Convert JSON data to the declared type.

        Raises:
            DoesNotFit: the value has another type.
        """
        try:
            # Strict models accept strings for dates only when pydantic parses JSON text.
            return self._adapter.validate_json(to_json(value))
        except ValidationError as error:
            raise DoesNotFit(f"{self.name}: {first_problem(error)}") from cause_of(error)
        except PydanticSerializationError as error:
            raise DoesNotFit(f"{self.name}: {error}") from error

    def check(self, value: object) -> T:
        """Validate a Python value against the declared type.

        Raises:
            DoesNotFit: the value has another type.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise DoesNotFit(f"{self.name}: {first_problem(error)}") from cause_of(error)

    def write(self, value: object, *, round_trip: bool = False) -> JsonValue:
        """Convert `value` to JSON that is identical in every process.

        Args:
            value: a value of the declared type.
            round_trip: omit output-only data such as computed fields, so that `read` accepts the
                result.

        Raises:
            DoesNotFit: the value has another type, or contains something that is not JSON.
        """
        try:
            checked = self.check(without_iterators(value))
            dumped = self._adapter.dump_python(
                checked, mode="json", by_alias=True, warnings="error", round_trip=round_trip
            )
            python = self._adapter.dump_python(checked, by_alias=True, warnings=False, round_trip=round_trip)
            return check_json(_faithful(dumped, python), self.name)
        except (PydanticSerializationError, NotJson) as error:
            raise DoesNotFit(f"{self.name}: {str(error).splitlines()[-1].strip()}") from error


def first_problem(error: ValidationError) -> str:
    """The first error with its field path, or the number of errors if there are too many."""
    if has_too_many(error):
        return f"{error.error_count():,} errors, too many to list"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def has_too_many(error: ValidationError) -> bool:
    """Whether listing the errors is too expensive: pydantic builds all of them, at 1 kB each."""
    return error.error_count() > _MOST_ERRORS


def cause_of(error: ValidationError) -> ValidationError | None:
    """`error`, or `None` if logging it would be too expensive."""
    return None if has_too_many(error) else error


def _faithful(dumped: Any, python: Any) -> Any:
    """Adjust `dumped` so that every process dumps `python` identically and without loss.

    Set members are sorted, because hashes differ between processes and a call is recognized by its
    input after a pause. Floats that JSON cannot represent are kept, to be rejected later; pydantic
    would replace them with null.
    """
    if type(dumped) is str:  # the most common case
        return dumped
    match dumped, python:
        case None, float():
            return python
        case list(), set() | frozenset():
            return sorted(dumped, key=lambda member: json.dumps(member, sort_keys=True))
        case list(), list() | tuple() if len(dumped) == len(python):
            return [_faithful(a, b) for a, b in zip(dumped, python, strict=True)]
        case dict(), dict() if len(dumped) == len(python):
            return {key: _faithful(a, b) for (key, a), b in zip(dumped.items(), python.values(), strict=True)}
    return dumped


def _name(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) else str(declared)
