"""Working memories in Redis, shared by all replicas of an agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias, Unpack

from redis.exceptions import NoScriptError

from meshpoint.adapters.redis import script_calls
from meshpoint.adapters.redis.connection import RedisConnection, RequestLimits
from meshpoint.adapters.redis.script_calls import (
    ScriptCall,
    ScriptReply,
    decode_name,
    fenced_error,
    is_consistent,
    parse_contents,
    raise_for_reply,
    raise_if_damaged,
    unpack_reply,
)
from meshpoint.adapters.redis.scripts import (
    ADOPT,
    EXECUTE,
    FORGET,
    LIST_KEYS,
    READ,
    RETAIN,
    STAGE,
    SWAP,
)
from meshpoint.adapters.redis.staging import encode_steps, is_storable, max_read_bytes
from meshpoint.errors import MemoryRefused, MemoryUnavailable
from meshpoint.model.ids import new_id
from meshpoint.model.memory import (
    READ_COMMANDS,
    WRITE_COMMANDS,
    Answer,
    Command,
    Item,
    MemoryContents,
    Owner,
)

_READ_BATCH_KEYS = 500
"""Keys that one script call handles, so that a large memory does not block the server."""

READ_ATTEMPTS = 3
"""Attempts to read a memory in parts that no write separates. Then it is read in one call."""

_MAX_MEMORY_BYTES = 129 * 2**20
"""Maximum bytes of a memory to read at once, counting eight extra bytes per element."""

_MAX_CONNECTIONS = 16
_STAGING_TTL = timedelta(hours=1)
_MILLISECOND = timedelta(milliseconds=1)

# First and last rank, both inclusive, from 0; -1 is the last rank.
_RankRange: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _MemoryKeys:
    """The Redis keys of one memory. The braces put all of them into one cluster slot."""

    agent_id: str
    prefix: str

    @classmethod
    def for_memory(cls, namespace: str, agent_id: str) -> _MemoryKeys:
        return cls(agent_id, f"{namespace}:L1:{{{agent_id}}}:")

    @property
    def head_and_index(self) -> tuple[bytes, bytes]:
        """Keys of the head and of the index."""
        return f"{self.prefix}head".encode(), f"{self.prefix}index".encode()

    @property
    def value_prefix(self) -> bytes:
        """Prefix of the keys of values."""
        return f"{self.prefix}working:".encode()

    def new_staging_prefix(self, owner: Owner) -> bytes:
        """A unique prefix for temporary keys."""
        return f"{self.prefix}restore:{owner.run_id}:{new_id()}:".encode()


class RedisWorkingMemory:
    """A `meshpoint.ports.working_memory.WorkingMemory` in Redis 6.0 or later.

        {namespace}:L1:{A}:working:{key}    the values; A is the agent id in braces
        {namespace}:L1:{A}:index            all keys, with the expiry of each
        {namespace}:L1:{A}:head             run, fence and version
        {namespace}:L1:{A}:restore:…        values staged by `replace`, for an hour

    All of it expires `active_ttl` after the last write, or `paused_ttl` after the task paused. A
    key that is in the index but does not exist was evicted. A key that is not in the index was
    written by others and is not part of the memory. For one event loop.

    Args:
        max_bytes: maximum bytes of a memory to read at once, counting eight extra per element.
        limits: when requests to Redis fail.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        max_bytes: int = _MAX_MEMORY_BYTES,
        active_ttl: timedelta = timedelta(hours=24),
        paused_ttl: timedelta = timedelta(days=14),
        **limits: Unpack[RequestLimits],
    ) -> None:
        self._connection = RedisConnection(
            url,
            setting="agent.memory_url",
            unavailable=MemoryUnavailable,
            connections=_MAX_CONNECTIONS,
            **limits,
        )
        self._namespace = namespace
        self._max_bytes = max_bytes
        self.active_ttl, self.paused_ttl = active_ttl, paused_ttl

    @property
    def durable(self) -> bool:
        """`True`: a memory outlives the process."""
        return True

    async def open(self) -> None:
        """Check that Redis answers and accepts writes."""
        await self._connection.check(
            _MemoryKeys.for_memory(self._namespace, new_id()).head_and_index[0]
        )

    async def execute(
        self, owner: Owner, commands: Sequence[Command], *, expected_version: int = 0
    ) -> tuple[int, list[Answer]]:
        """Execute commands in one round trip. Returns the memory's version and the answers.

        Raises:
            MemoryFenced: another run owns the memory, with the same or a higher fence.
            MemoryLost: the memory is missing, has an earlier owner, or is older than version
                `seen`; or a key that a command names was evicted. No command was executed.
            MemoryRefused: a command does not fit its key's type, or its answer is too large; names
                the key. Earlier commands were executed.
            MemoryUnavailable: the commands may or may not have been executed.
        """
        names = self._memory_keys(owner.agent_id)
        for command in commands:
            if command.name not in READ_COMMANDS | WRITE_COMMANDS:
                raise MemoryRefused(
                    f"memory key {command.key!r}: {command.name} is not a working-memory command"
                )
            if not command.key:
                raise MemoryRefused(f"memory key '': {command.name} needs a key")
        positions = {
            key: place
            for place, key in enumerate(dict.fromkeys(each.key for each in commands), start=3)
        }
        writes = b"w" if any(command.is_write for command in commands) else b"r"
        ttl = self.active_ttl // _MILLISECOND
        args: list[bytes | int] = [
            *_owner_args(owner),
            expected_version,
            ttl,
            len(names.value_prefix) + 1,
            writes,
            self._max_bytes,
        ]
        for command in commands:
            mode = b"w" if command.is_write else b"r"
            args += [
                command.name.encode(),
                positions[command.key],
                mode,
                len(command.args),
                *command.args,
            ]
        keys = (*names.head_and_index, *[names.value_prefix + key.encode() for key in positions])
        [reply] = await self._run_idempotent(names, [ScriptCall(EXECUTE, keys, tuple(args))])
        raise_for_reply(owner, reply)
        _, version, answers = reply
        return version, [
            _exact_integer(command, answer)
            for command, answer in zip(commands, answers, strict=True)
        ]

    async def keys(self, owner: Owner, *, expected_version: int = 0) -> list[str]:
        """The keys that exist. Raises like `execute`, and `MemoryLost` if any key was evicted."""
        names = self._memory_keys(owner.agent_id)
        args = (*_owner_args(owner), expected_version, names.value_prefix, self._max_bytes)
        [reply] = await self._run_idempotent(
            names, [ScriptCall(LIST_KEYS, names.head_and_index, args)]
        )
        raise_for_reply(owner, reply)
        return [decode_name(key) for key in reply[1] if key]

    async def read(self, agent_id: str) -> MemoryContents:
        """The whole memory at one instant, in one round trip, or two for more than 500 keys."""
        return await self._read_all(self._memory_keys(agent_id), self._max_bytes)

    async def _read_all(self, names: _MemoryKeys, limit: int) -> MemoryContents:
        for _ in range(READ_ATTEMPTS):
            replies = await self._read(names, 0, _READ_BATCH_KEYS - 1, limit)
            if parts := list(_ranks(replies[0][5], after=_READ_BATCH_KEYS)):
                each = limit // len(parts)
                replies += map(
                    unpack_reply,
                    await self._run_idempotent(
                        names, [_read_call(names, *part, each) for part in parts]
                    ),
                )
            if is_consistent(replies):
                found = parse_contents(replies)
                if not (parts and found.oversized_keys):
                    return found
                break  # a part exceeds its share of the limit
        return parse_contents(await self._read(names, 0, -1, limit))

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of the memory if it still has this version. Returns whether it has.

        Takes one round trip, or two for more than 500 keys.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """
        names = self._memory_keys(owner.agent_id)
        args = (
            *_owner_args(owner),
            version,
            self.active_ttl // _MILLISECOND,
            names.value_prefix,
            _READ_BATCH_KEYS - 1,
        )
        [reply] = await self._run_idempotent(
            names, [ScriptCall(ADOPT, names.head_and_index, args)]
        )
        raise_for_reply(owner, reply)
        if reply[0] == b"ok":
            await self._retain(owner, self.active_ttl, _ranks(reply[1], after=_READ_BATCH_KEYS))
        return bool(reply[0] == b"ok")

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        """Replace the whole memory with `items`, become its owner, and read it back.

        A few megabytes take one round trip. A failure at any point leaves either the old or the
        new memory.

        Raises:
            MemoryFenced: its owner has a higher fence, and `force` is not set.
            MemoryUnavailable: this run owns the memory, but its version is not `seen`; or Redis
                did not answer, and the memory may or may not have been replaced.
        """
        items = [item for item in items if is_storable(item)]
        try:
            replies = await self._replace(owner, items, expected_version, force, by_digest=True)
        except NoScriptError:
            replies = await self._replace(owner, items, expected_version, force, by_digest=False)
        if is_consistent(replies):
            found = parse_contents(replies)
        else:  # another write came in between
            found = await self._read_all(
                self._memory_keys(owner.agent_id), self._read_limit(items)
            )
        if found.run_id is not None and found.run_id != owner.run_id:
            raise fenced_error(owner, found.run_id, found.fence)
        return found

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Let the memory expire after `paused_ttl` or `active_ttl` from now.

        Does nothing if another run with the same or a higher fence owns it.
        """
        ttl = self.paused_ttl if paused else self.active_ttl
        if total := await self._retain(owner, ttl, [(0, _READ_BATCH_KEYS - 1)]):
            await self._retain(owner, ttl, _ranks(total, after=_READ_BATCH_KEYS))

    async def forget(self, owner: Owner) -> None:
        """Delete the memory, unless another run with the same or a higher fence owns it."""
        names = self._memory_keys(owner.agent_id)
        [reply] = await self._run_idempotent(
            names,
            [ScriptCall(FORGET, names.head_and_index, (*_owner_args(owner), names.value_prefix))],
        )
        raise_if_damaged(reply)

    async def close(self) -> None:
        """Release every connection."""
        await self._connection.close()

    def _memory_keys(self, agent_id: str) -> _MemoryKeys:
        return _MemoryKeys.for_memory(self._namespace, agent_id)

    async def _read(
        self, names: _MemoryKeys, first: int, last: int, limit: int
    ) -> list[ScriptReply]:
        return [
            unpack_reply(reply)
            for reply in await self._run_idempotent(names, [_read_call(names, first, last, limit)])
        ]

    def _read_limit(self, items: Sequence[Item]) -> int:
        """Read limit for restored `items`. They may exceed `max_bytes` if that was reduced."""
        return max(self._max_bytes, sum(map(max_read_bytes, items)))

    async def _retain(self, owner: Owner, ttl: timedelta, ranks: Iterable[_RankRange]) -> int:
        """Let the keys at these ranks expire after `ttl` from now.

        Returns:
            The number of members in the index, or 0 if the memory has another owner.
        """
        names = self._memory_keys(owner.agent_id)
        args = (*_owner_args(owner), ttl // _MILLISECOND, names.value_prefix)
        calls = [ScriptCall(RETAIN, names.head_and_index, (*args, *some)) for some in ranks]
        replies = await self._run_idempotent(names, calls) if calls else []
        for reply in replies:
            raise_if_damaged(reply)
        return min([reply[1] if reply[0] == b"ok" else 0 for reply in replies], default=0)

    async def _replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        seen: int | None,
        force: bool,
        *,
        by_digest: bool,
    ) -> list[ScriptReply]:
        """Stage `items`, swap them in and read them back. Returns the replies of the reads."""
        names = self._memory_keys(owner.agent_id)
        staged = names.new_staging_prefix(owner)
        index, values = staged + b"index", staged + b"working:"
        batch: list[ScriptCall] = []
        size = count = 0
        for step in encode_steps(items):
            call = ScriptCall(STAGE, (index,), (values, _STAGING_TTL // _MILLISECOND, step))
            if batch and size + call.size > script_calls.PIPELINE_BYTES:
                for reply in await self._run(names, batch, by_digest=by_digest):
                    raise_for_reply(owner, reply)
                batch, size = [], 0
            batch.append(call)
            size, count = size + call.size, count + 1
        staging = (names.value_prefix, values, count, len(items))
        conditions = (b"" if seen is None else seen, int(force))
        args = (*_owner_args(owner), self.active_ttl // _MILLISECOND, *staging, *conditions)
        ranks = list(_ranks(len(items) + 1))
        limit = self._read_limit(items)
        reads = [_read_call(names, *rank_range, limit) for rank_range in ranks]
        replies = await self._run(
            names,
            [*batch, ScriptCall(SWAP, (*names.head_and_index, index), args), *reads],
            by_digest=by_digest,
        )
        for reply in replies[: -len(reads)]:
            raise_for_reply(owner, reply)
        return [unpack_reply(reply) for reply in replies[-len(reads) :]]

    async def _run(
        self, names: _MemoryKeys, calls: Sequence[ScriptCall], *, by_digest: bool
    ) -> list[ScriptReply]:
        return await script_calls.run_scripts(
            self._connection, f"memory {names.agent_id}", calls, by_digest=by_digest
        )

    async def _run_idempotent(
        self, names: _MemoryKeys, calls: Sequence[ScriptCall]
    ) -> list[ScriptReply]:
        return await script_calls.run_idempotent(
            self._connection, f"memory {names.agent_id}", calls
        )


def _owner_args(owner: Owner) -> tuple[bytes, int]:
    return owner.run_id.encode(), owner.fence


def _ranks(total: int, *, after: int = 0) -> Iterator[_RankRange]:
    """Split the ranks from `after` to `total` into ranges of `_READ_BATCH_KEYS`."""
    for first in range(after, total, _READ_BATCH_KEYS):
        yield first, first + _READ_BATCH_KEYS - 1


def _read_call(names: _MemoryKeys, first: int, last: int, limit: int) -> ScriptCall:
    return ScriptCall(READ, names.head_and_index, (names.value_prefix, limit, first, last))


def _exact_integer(command: Command, answer: Answer) -> Answer:
    """Convert an integer too large for Lua, which the script returns as text."""
    exact = command.name in {"INCRBY", "HINCRBY"} and isinstance(answer, bytes)
    return int(answer) if exact else answer  # type: ignore[arg-type]
