"""Convert values of a declared type to JSON and back."""

from __future__ import annotations

import json
from typing import Any, Generic, Literal, TypeVar

from pydantic import JsonValue, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import (
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
)
from pydantic_core import PydanticSerializationError, to_json

from meshpoint.errors import ConfigurationError, MeshpointError, NotJson
from meshpoint.model.json_values import check_json, copy_containers

_T = TypeVar("_T")


_MAX_ERRORS = 1000
_MAX_PATH_LENGTH = 300
"""Maximum characters of a field's path in an error. Nested lists make it long."""


class TypeMismatch(MeshpointError):
    """A value does not match the declared type. The message names the type and the field."""


_SCALARS = (str, int, bool)
_MAX_PLAIN_INT = 2**53


class DeclaredType(Generic[_T]):
    """A declared type: pydantic model, dataclass, TypedDict, builtin, or any `TypeAdapter`.

    Raises:
        ConfigurationError: pydantic cannot handle the type; `key` says where it was declared.
    """

    def __init__(self, declared: Any, key: str) -> None:
        try:
            self._adapter: TypeAdapter[_T] = (
                declared if isinstance(declared, TypeAdapter) else TypeAdapter(declared)
            )
        except (
            PydanticSchemaGenerationError,
            PydanticUndefinedAnnotation,
            PydanticUserError,
        ) as error:
            problem = f"{_type_name(declared)} cannot become JSON: {str(error).splitlines()[0]}"
            raise ConfigurationError(
                key, problem, "use a pydantic model, a dataclass or a builtin type"
            ) from error
        self.name = _type_name(declared)
        self._scalar: type | None = next((each for each in _SCALARS if declared is each), None)

    def _is_plain(self, value: object) -> bool:
        """Whether `value` has the declared scalar type and is its own JSON form."""
        if type(value) is not self._scalar:
            return False
        return (
            value.isascii()
            if isinstance(value, str)
            else isinstance(value, int) and abs(value) < _MAX_PLAIN_INT
        )

    def json_schema(self, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
        """The JSON schema of what is read ("validation") or written ("serialization").

        Raises:
            ConfigurationError: The type has no JSON schema.
        """
        try:
            return self._adapter.json_schema(mode=mode)
        except PydanticInvalidForJsonSchema as error:
            raise ConfigurationError(
                self.name, f"it has no JSON schema: {error.message}", "declare a JSON type"
            ) from error

    def read(self, value: object) -> _T:
        """Convert JSON data to the declared type.

        Raises:
            TypeMismatch: the value has another type.
        """
        if self._is_plain(value):  # fast, because each replay of a function agent reads again
            return value  # type: ignore[return-value]  # it has the declared type
        try:
            # Strict models accept strings for dates only when pydantic parses JSON text.
            return self._adapter.validate_json(to_json(value))
        except ValidationError as error:
            raise TypeMismatch(f"{self.name}: {first_problem(error)}") from loggable_cause(error)
        except PydanticSerializationError as error:
            raise TypeMismatch(f"{self.name}: {error}") from error

    def check(self, value: object) -> _T:
        """Validate a Python value against the declared type.

        Raises:
            TypeMismatch: the value has another type.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise TypeMismatch(f"{self.name}: {first_problem(error)}") from loggable_cause(error)

    def write(self, value: object, *, round_trip: bool = False) -> JsonValue:
        """Convert `value` to JSON that is identical in every process.

        Args:
            value: a value of the declared type.
            round_trip: omit output-only data such as computed fields, so that `read` accepts the
                result.

        Raises:
            TypeMismatch: the value has another type, or contains something that is not JSON.
        """
        if self._is_plain(value):
            return value  # type: ignore[return-value]  # a scalar
        try:
            validated = self.check(copy_containers(value))
            dumped = self._adapter.dump_python(
                validated, mode="json", by_alias=True, warnings="error", round_trip=round_trip
            )
            python_value = self._adapter.dump_python(
                validated, by_alias=True, warnings=False, round_trip=round_trip
            )
            return check_json(_make_deterministic(dumped, python_value), self.name)
        except (PydanticSerializationError, UnicodeDecodeError, NotJson) as error:
            raise TypeMismatch(f"{self.name}: {str(error).splitlines()[-1].strip()}") from error


def first_problem(error: ValidationError) -> str:
    """The first error with its field path, or the number of errors if there are too many."""
    if has_too_many_errors(error):
        return f"{error.error_count():,} errors, too many to list"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field_path = ".".join(str(part) for part in first["loc"])
    if len(field_path) > _MAX_PATH_LENGTH:
        field_path = f"{field_path[: _MAX_PATH_LENGTH - 1]}…"
    return f"{field_path}: {first['msg']}" if field_path else first["msg"]


def has_too_many_errors(error: ValidationError) -> bool:
    """Whether listing the errors is too expensive: pydantic builds all of them, at 1 kB each."""
    return error.error_count() > _MAX_ERRORS


def loggable_cause(error: ValidationError) -> ValidationError | None:
    """`error`, or `None` if logging it would be too expensive."""
    return None if has_too_many_errors(error) else error


def _make_deterministic(dumped: Any, python_value: Any) -> Any:
    """Adjust `dumped` so that every process dumps `python_value` identically and without loss.

    Set members are sorted, because hashes differ between processes and a call is recognized by its
    input after a pause. Floats that JSON cannot represent are kept, to be rejected later; pydantic
    would replace them with null.
    """
    if type(dumped) is str:  # the most common case
        return dumped
    match dumped, python_value:
        case None, float():
            return python_value
        case list(), set() | frozenset():
            return sorted(dumped, key=lambda member: json.dumps(member, sort_keys=True))
        case list(), list() | tuple() if len(dumped) == len(python_value):
            return [_make_deterministic(a, b) for a, b in zip(dumped, python_value, strict=True)]
        case dict(), dict() if len(dumped) == len(python_value):
            return {
                key: _make_deterministic(a, b)
                for (key, a), b in zip(dumped.items(), python_value.values(), strict=True)
            }
    return dumped


def _type_name(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) else str(declared)
