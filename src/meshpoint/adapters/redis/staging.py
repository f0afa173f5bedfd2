"""Splits items into steps small enough not to block a Redis server or a connection for long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgpack

from meshpoint.adapters.redis.scripts import MAX_COMMAND_ARGS
from meshpoint.model.memory import Item, Kind

STEP_BYTES = 256 * 1024
"""Approximate limit on the bytes of one step. A larger element is a step of its own."""

_STEP_KEYS = 500

_ELEMENTS_PER_ENTRY = {Kind.HASH: 2, Kind.ZSET: 2}


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive elements of an item. `staged` is the number of elements before these."""

    item: Item
    staged: int
    elements: list[bytes]

    def args(self) -> list[Any]:
        ends = "+inf" if self.item.expires_at is None else self.item.expires_at
        return [self.item.key, self.item.kind.value, ends, self.staged, self.elements]


def encode_steps(items: Sequence[Item]) -> Iterator[bytes]:
    """Arguments for the `STAGE` script, one per step."""
    args: list[list[Any]] = []
    keys = count = size = 0
    for part in (part for item in items for part in _parts(item)):
        weight = sum(map(len, part.elements))
        if keys and (
            keys == _STEP_KEYS
            or count + len(part.elements) > MAX_COMMAND_ARGS
            or size + weight > STEP_BYTES
        ):
            yield _pack(args)
            args, keys, count, size = [], 0, 0, 0
        args.append(part.args())
        keys, count, size = keys + 1, count + len(part.elements), size + weight
    if args:
        yield _pack(args)


def _pack(args: list[list[Any]]) -> bytes:
    # Redis' Lua cannot read the bin type.
    return cast(bytes, msgpack.packb(args, use_bin_type=False))


def is_storable(item: Item) -> bool:
    """Whether Redis can store it: it is a string, or not empty."""
    return item.kind is Kind.STRING or bool(item.content)


def max_read_bytes(item: Item) -> int:
    """Upper bound, in bytes, on the size that the read scripts count for an item."""
    name = len(item.key.encode()) + 64
    return name + (
        len(cast(bytes, item.content))
        if item.kind is Kind.STRING
        else sum(8 + len(e) for e in _elements(item))
    )


def _parts(item: Item) -> Iterator[_Part]:
    unit = _ELEMENTS_PER_ENTRY.get(item.kind, 1)
    flat = _elements(item)
    elements: list[bytes] = []
    size = staged = 0
    while element := list(islice(flat, unit)):
        elements += element
        size += sum(map(len, element))
        if len(elements) >= MAX_COMMAND_ARGS or size >= STEP_BYTES:
            yield _Part(item, staged, elements)
            staged += len(elements) // unit
            elements, size = [], 0
    if elements:
        yield _Part(item, staged, elements)


def _elements(item: Item) -> Iterator[bytes]:
    match item.kind:
        case Kind.STRING:
            yield cast(bytes, item.content)
        case Kind.HASH:
            for field, value in cast(Mapping[bytes, bytes], item.content).items():
                yield field
                yield value
        case Kind.ZSET:
            for member, score in cast(Mapping[bytes, float], item.content).items():
                yield repr(float(score)).encode()
                yield member
        case Kind.LIST | Kind.SET:
            yield from cast("tuple[bytes, ...] | frozenset[bytes]", item.content)
