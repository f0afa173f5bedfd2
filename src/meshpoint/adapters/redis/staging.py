"""Items on their way into Redis, in steps that neither a server nor a connection has long to do with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgpack

from meshpoint.adapters.redis.scripts import MAX_COMMAND_ARGS
from meshpoint.model.memory import Item, Kind

STEP_BYTES = 256 * 1024
"""About how much one call of a script takes, unless one value has more."""

STEP_KEYS = 500

_ELEMENTS_PER_ENTRY = {Kind.HASH: 2, Kind.ZSET: 2}


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of an item. `staged` is how many of its elements come before these."""

    item: Item
    staged: int
    elements: list[bytes]

    def args(self) -> list[Any]:
        ends = "+inf" if self.item.expires_at is None else self.item.expires_at
        return [self.item.key, self.item.kind.value, ends, self.staged, self.elements]


def encode_steps(items: Sequence[Item]) -> Iterator[bytes]:
    """The argument for the script that stages, step by step."""
    args: list[list[Any]] = []
    keys = count = size = 0
    for part in (part for item in items for part in _parts(item)):
        weight = sum(map(len, part.elements))
        if keys and (
            keys == STEP_KEYS or count + len(part.elements) > MAX_COMMAND_ARGS or size + weight > STEP_BYTES
        ):
            yield _pack(args)
            args, keys, count, size = [], 0, 0, 0
        args.append(part.args())
        keys, count, size = keys + 1, count + len(part.elements), size + weight
    if args:
        yield _pack(args)


def _pack(args: list[list[Any]]) -> bytes:
    return cast(bytes, msgpack.packb(args, use_bin_type=False))  # Redis' Lua reads no other


def is_storable(item: Item) -> bool:
    """Whether Redis can have it: it has something in it, or is a string."""
    return item.kind is Kind.STRING or bool(item.content)


def max_read_bytes(item: Item) -> int:
    """Upper bound, in bytes, on the size that the read scripts count for an item."""
    name = len(item.key.encode()) + 64
    return name + (
        len(cast(bytes, item.content)) if item.kind is Kind.STRING else sum(8 + len(e) for e in _elements(item))
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
