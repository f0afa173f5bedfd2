"""Find the parts of a deliverable whose type is marked as `Secret`.

Walks a value together with its type and its JSON. The types of fields come from the class of
models, dataclasses and named tuples, otherwise from the annotation. Where the JSON has another
shape than the value (a custom serializer, a set), the nearest enclosing place is marked: rather
too much than too little.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, JsonValue, SecretBytes, SecretStr

from meshpoint.model.secrets import Secret, json_pointer

_WRAPPED_SECRETS = (SecretStr, SecretBytes, pydantic.Secret)
_QUALIFIERS = ("Required", "NotRequired", "ReadOnly", "Final")  # names match typing_extensions too
_UNKNOWN = ""
"""Stands for JSON that is unknown because its shape differs from the value's."""
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
"""Types of values that are secret only if an annotation says so."""


class UnrecoverableSecret(ValueError):
    """A secret whose JSON is masked with stars."""


def find_secret_pointers(declared: Any, value: Any, written: JsonValue) -> list[str]:
    """Return JSON pointers to the secret parts of `value`; `written` is its JSON.

    Raises:
        UnrecoverableSecret: A `SecretStr`, or another secret type of pydantic, cannot be restored
            from its JSON.
    """
    if (declared is Any or declared is JsonValue) and _is_plain_json(value):
        return []
    return list(dict.fromkeys(_walk(declared, value, written, "")))


def _is_plain_json(value: Any) -> bool:
    """Whether `value` consists of objects, lists and plain values only; most results do."""
    pending = [value]
    for each in pending:
        kind = type(each)
        if kind in _PLAIN_TYPES:
            continue
        if kind is dict and _PLAIN_TYPES.issuperset(map(type, each)):
            pending += each.values()
        elif kind is list:
            pending += each
        else:
            return False
    return True


def _walk(declared: Any, value: Any, written: JsonValue, at: str) -> Iterator[str]:
    if _is_plain(declared, value):
        return
    declared, metadata = _unwrap_type(declared)
    if isinstance(value, _WRAPPED_SECRETS):
        _reject_masked(value, written, at)
        yield at
    elif written is None:
        return
    elif any(each is Secret or isinstance(each, Secret) for each in metadata):
        yield at
    elif typing.get_origin(declared) in {typing.Union, types.UnionType}:
        for arm in typing.get_args(declared):
            yield from _walk(arm, value, written, at)
    elif isinstance(value, pydantic.RootModel):
        yield from _walk(_field_type(type(value).model_fields["root"]), value.root, written, at)
    elif (members := _members(declared, value)) is not None:
        yield from _walk_fields(members, value, written, at)
    else:
        yield from _walk_container(declared, value, written, at)


def _walk_fields(
    members: Mapping[str, tuple[str, Any]], value: Any, written: JsonValue, at: str
) -> Iterator[str]:
    """Walk a value with named members: for each, its key in JSON and its type."""
    for index, (name, (key, declared)) in enumerate(members.items()):
        member = value.get(name) if isinstance(value, dict) else getattr(value, name)
        if isinstance(written, dict) and key in written:
            yield from _walk(declared, member, written[key], at + json_pointer(key))
        elif isinstance(written, list) and isinstance(value, tuple) and index < len(written):
            yield from _walk(declared, member, written[index], at + json_pointer(index))
        elif member is not None and _has_secret(declared, member):
            yield at


def _walk_container(declared: Any, value: Any, written: JsonValue, at: str) -> Iterator[str]:
    arguments = typing.get_args(declared)
    match value:
        case dict():
            key_type, member_type = arguments if len(arguments) == 2 else (Any, Any)
            if any(_has_secret(key_type, key) for key in value):
                yield at
            elif isinstance(written, dict) and len(value) == len(written):
                for (key, inner), member in zip(written.items(), value.values(), strict=True):
                    if not _is_plain(member_type, member):
                        yield from _walk(member_type, member, inner, at + json_pointer(key))
            elif any(_has_secret(member_type, member) for member in value.values()):
                yield at
        case list() | tuple() if isinstance(written, list) and len(value) == len(written):
            for index, (member, inner) in enumerate(zip(value, written, strict=True)):
                member_type = _member_type(arguments, index)
                if not _is_plain(member_type, member):
                    yield from _walk(member_type, member, inner, at + json_pointer(index))
        case list() | tuple() | set() | frozenset():
            if any(
                _has_secret(_member_type(arguments, index), member)
                for index, member in enumerate(value)
            ):
                yield at


def _has_secret(declared: Any, value: Any) -> bool:
    if _is_plain(declared, value):
        return False
    return any(True for _ in _walk(declared, value, _UNKNOWN, ""))


def _is_plain(declared: Any, value: Any) -> bool:
    return declared is Any and type(value) in _PLAIN_TYPES


def _member_type(arguments: tuple[Any, ...], index: int) -> Any:
    if len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is Ellipsis):
        return arguments[0]
    return arguments[index] if index < len(arguments) else Any


def _members(declared: Any, value: Any) -> Mapping[str, tuple[str, Any]] | None:
    """Return the JSON key and the type of each attribute; `None` if there are no named members."""
    kind: type = type(value)
    if isinstance(value, BaseModel):
        shown = {
            name: field for name, field in type(value).model_fields.items() if not field.exclude
        }
        fields = {
            name: (field.serialization_alias or field.alias or name, _field_type(field))
            for name, field in shown.items()
        }
        return fields | {name: (name, Any) for name in value.__pydantic_extra__ or {}}
    if dataclasses.is_dataclass(value):
        return {name: (name, each) for name, each in _hints(kind).items() if hasattr(value, name)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {name: (name, _hints(kind).get(name, Any)) for name in kind._fields}
    origin = typing.get_origin(declared) or declared
    if isinstance(value, dict) and hasattr(origin, "__required_keys__"):  # a TypedDict
        return {name: (name, _hints(origin).get(name, Any)) for name in value}
    return None


@functools.lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, AttributeError, TypeError):
        # Names that are local to a function; pydantic has resolved them if it knows the fields.
        fields = getattr(kind, "__pydantic_fields__", {})
        return {name: _field_type(field) for name, field in fields.items()}


def _field_type(field: Any) -> Any:
    declared = Any if field.annotation is None else field.annotation
    return functools.reduce(
        lambda kind, each: typing.Annotated[kind, each], field.metadata, declared
    )


def _unwrap_type(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    """Strip `Annotated`, `Required`, `type X = …` and `NewType`; return type and metadata.

    `JsonValue` marks nothing as secret. It is `Any` here: each of its alternatives would walk the
    whole value.
    """
    metadata: tuple[Any, ...] = ()
    while True:
        origin = typing.get_origin(declared)
        if origin is typing.Annotated:
            metadata += declared.__metadata__
            declared = declared.__origin__
        elif getattr(origin, "_name", None) in _QUALIFIERS:
            declared = typing.get_args(declared)[0]
        elif isinstance(declared, typing.NewType):
            declared = declared.__supertype__
        elif declared is JsonValue:
            return Any, metadata
        elif "TypeAliasType" in (type(declared).__name__, type(origin).__name__):
            declared = declared.__value__
        else:
            return declared, metadata


def _reject_masked(value: Any, written: JsonValue, at: str) -> None:
    if value.get_secret_value() and written in (str(value), _UNKNOWN):
        raise UnrecoverableSecret(
            f"{at or 'the value'} is a {type(value).__name__}, whose JSON is only stars; "
            "use Annotated[str, Secret]"
        )
