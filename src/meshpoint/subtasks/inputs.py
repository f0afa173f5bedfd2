"""Digest the inputs of a subtask, to decide whether a recorded deliverable is still valid.

Digests depend on the values, not on how they print: they are the same in every process and under
every Python version.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import inspect
import ipaddress
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from pathlib import PurePath
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pydantic
from pydantic import AnyUrl, BaseModel, SecretBytes, SecretStr

from meshpoint.errors import SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.json_values import MAX_DEPTH
from meshpoint.subtasks.versions import closure_variables

_TEXT_TYPES = (
    Decimal,
    Fraction,
    UUID,
    PurePath,
    AnyUrl,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)


class _NotCanonical(Exception):
    """A value without canonical form: what it is, and its path inside the argument."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.what, self.path = what, path

    def prefixed(self, step: str) -> _NotCanonical:
        """Return the error with `step`, the path within the container, prepended."""
        return _NotCanonical(self.what, step + self.path)


def input_digests(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    strict: bool = True,
) -> dict[str, str]:
    """Return one digest for each argument of `function`, and for each closure variable.

    How an argument is passed does not matter: by position, by name, by a partial or as the
    default. Left out are the task's own context, the `self` of a method, and closure variables and
    defaults that are not data: clients, functions, modules. What a function reads from its module
    or from `self` is not considered.

    A list equals a tuple, but 1, 1.0, True and "1" are four values. Models, dataclasses and enums
    are digested as their class name and fields (of models, the fields that are not excluded from
    JSON).

    With `strict=False`, arguments that are not data are left out too.

    Raises:
        SubtaskRefused: An argument is not data, or contains something that is not. The message
            names it and subtask `name`.
    """
    found = dict(_closure_digests(function))
    for label, value, explicit in _bound_arguments(function, args, kwargs):
        if isinstance(value, TaskExecutionContext):
            continue
        try:
            found[label] = _digest(value)
        except _NotCanonical as problem:
            if explicit and strict:
                raise SubtaskRefused(
                    f"subtask {name!r}: argument {label + problem.path!r} is {problem.what}, "
                    "which has no canonical form; pass data, or use it through a closure"
                ) from None
    return found


def try_digest(value: object) -> str | None:
    """Return the digest of `value`; `None` if it is not data."""
    try:
        return _digest(value)
    except _NotCanonical:
        return None


def _bound_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield each argument's label and value, and whether the caller passed it."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        # It has no signature, or a decorator shows a wrong one: the call itself raises if needed.
        yield from ((f"args[{index}]", value, True) for index, value in enumerate(args))
        yield from ((key, value, True) for key, value in kwargs.items())
        return
    explicit = set(bound.arguments)
    bound.apply_defaults()
    for label, value in bound.arguments.items():
        match signature.parameters[label].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                yield from ((f"{label}[{index}]", each, True) for index, each in enumerate(value))
            case inspect.Parameter.VAR_KEYWORD:  # a name may also be a positional-only parameter's
                yield from (
                    (f"**{key}" if key in bound.arguments else key, each, True)
                    for key, each in value.items()
                )
            case _:
                yield label, value, label in explicit


def _closure_digests(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    for name, value in closure_variables(function):
        try:
            yield f"closure.{name}", _digest(value)
        except _NotCanonical:
            continue


def _digest(value: object) -> str:
    text = json.dumps(_canonical(value, 0), separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical(value: Any, depth: int) -> Any:
    """Convert `value` to JSON in which each list begins with its kind.

    So different values never have the same form.
    """
    if depth > MAX_DEPTH:
        raise _NotCanonical(f"nested more than {MAX_DEPTH} deep")
    match value:
        case Enum():
            return ["enum", type(value).__qualname__, _canonical_enum(value, depth)]
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return ["int", f"{value:x}"] if value.bit_length() > 63 else int(value)
        case float() if math.isfinite(value):
            return float(value)
        case list() | tuple():
            return [
                "list",
                *_canonical_members(
                    ((f"[{index}]", member) for index, member in enumerate(value)), depth
                ),
            ]
        case set() | frozenset():
            return [
                "set",
                *sorted(
                    _canonical_members((("{…}", member) for member in value), depth),
                    key=json.dumps,
                ),
            ]
        case dict() | MappingProxyType():
            return ["dict", *_canonical_pairs(value, depth)]
        case BaseModel() | SecretStr() | SecretBytes() | pydantic.Secret():
            return _canonical_model(value, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["object", type(value).__qualname__, *_canonical_fields(fields, depth)]
    return _canonical_scalar(value)


def _canonical_scalar(value: Any) -> list[Any]:
    match value:
        case bytes() | bytearray() | memoryview():
            return ["bytes", base64.b64encode(bytes(value)).decode()]
        case datetime():
            return ["datetime", value.isoformat()]
        case date():
            return ["date", value.isoformat()]
        case time():
            return ["time", value.isoformat()]
        case timedelta():
            return ["timedelta", value.days, value.seconds, value.microseconds]
        case float():
            raise _NotCanonical(str(value))
    for kind in _TEXT_TYPES:
        if isinstance(value, kind):
            return [kind.__name__, str(value)]
    raise _NotCanonical(f"a {type(value).__name__}")


def _canonical_members(members: Iterable[tuple[str, Any]], depth: int) -> list[Any]:
    return [_canonical_member(step, member, depth) for step, member in members]


def _canonical_pairs(values: Mapping[Any, Any], depth: int) -> list[Any]:
    pairs = [
        [_canonical_member("{…}", key, depth), _canonical_member(_key_step(key), each, depth)]
        for key, each in values.items()
    ]
    return sorted(pairs, key=lambda pair: json.dumps(pair[0]))


def _key_step(key: Any) -> str:
    try:
        return f"[{key!r}]"
    except ValueError:  # an integer with more digits than Python prints
        return "[…]"


def _canonical_fields(fields: Mapping[str, Any], depth: int) -> list[Any]:
    return [[key, _canonical_member(f".{key}", fields[key], depth)] for key in sorted(fields)]


def _canonical_member(step: str, value: Any, depth: int) -> Any:
    try:
        return _canonical(value, depth + 1)
    except _NotCanonical as problem:
        raise problem.prefixed(step) from None


def _canonical_model(value: Any, depth: int) -> list[Any]:
    if not isinstance(value, BaseModel):
        return ["object", type(value).__name__, _canonical(value.get_secret_value(), depth)]
    # Not `model_dump`: it masks secrets, keeps the order of sets, and converts text to datetimes.
    fields = {
        key: getattr(value, key)
        for key, field in type(value).model_fields.items()
        if not field.exclude
    } | dict(value.__pydantic_extra__ or {})
    return ["object", type(value).__qualname__, *_canonical_fields(fields, depth)]


def _canonical_enum(member: Enum, depth: int) -> Any:
    try:
        return _canonical(member.value, depth + 1)
    except _NotCanonical:
        return member.name
