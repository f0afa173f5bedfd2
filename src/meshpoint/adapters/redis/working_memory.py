"""Working memories in Redis, so that whichever replica goes on with a task finds its memory there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from redis.exceptions import NoScriptError

from meshpoint.adapters.redis import script_calls
from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.adapters.redis.holding import held, name_of
from meshpoint.adapters.redis.outcomes import check, fenced, opened, refuse_damaged
from meshpoint.adapters.redis.script_calls import Call, Reply
from meshpoint.adapters.redis.scripts import ADOPT, EXECUTE, FORGET, LIST_KEYS, READ, RETAIN, STAGE, SWAP
from meshpoint.adapters.redis.staging import stays, steps, weight_of
from meshpoint.errors import MemoryRefused, MemoryUnavailable
from meshpoint.model.ids import new_id
from meshpoint.model.memory import READS, WRITES, Answer, Command, Held, Item, Owner

READ_KEYS = 500
"""Keys that one call of a script looks at, so that a large memory does not stop the server for others."""

READ_TRIES = 3
"""How often a memory is read in parts. If somebody wrote between them each time, it is read in one."""

LARGEST = 129 * 2**20
"""Maximum bytes of a memory that are read, counting eight extra bytes per element."""

_CONNECTIONS = 16
_STAGED = timedelta(hours=1)
_MILLISECOND = timedelta(milliseconds=1)

_Ranks: TypeAlias = tuple[int, int]  # the first and the last, as Redis counts: from 0, and -1 is the last one


@dataclass(frozen=True, slots=True)
class _Names:
    """The keys in Redis of one memory. The braces keep all of them in one slot of a cluster."""

    agent_id: str
    prefix: str

    @classmethod
    def of(cls, namespace: str, agent_id: str) -> _Names:
        return cls(agent_id, f"{namespace}:L1:{{{agent_id}}}:")

    @property
    def books(self) -> tuple[bytes, bytes]:
        """The head and the index."""
        return f"{self.prefix}head".encode(), f"{self.prefix}index".encode()

    @property
    def working(self) -> bytes:
        """What comes before the name of a key."""
        return f"{self.prefix}working:".encode()

    def staged(self, owner: Owner) -> bytes:
        """What comes before all that is staged; never the same twice."""
        return f"{self.prefix}restore:{owner.run_id}:{new_id()}:".encode()


class RedisWorkingMemory:
    """A `meshpoint.ports.working_memory.WorkingMemory` in Redis 6.0 or later.

        {namespace}:L1:{A}:working:{key}    the values, A being the agent id in braces
        {namespace}:L1:{A}:index            the keys, with the instants at which they end by their own time
        {namespace}:L1:{A}:head             run, fence and version
        {namespace}:L1:{A}:restore:…        what `replace` puts beside them, for an hour

    Everything lives for `active` after the last write, or for `paused` once the task paused. A key that is in the
    index and not there was evicted. A key that somebody puts there otherwise is no part of the memory.

    At most `largest` bytes of a memory are read at once, counting eight extra bytes per element.
    A request takes `timeout` at most. After one that failed, Redis is not asked for `retry_after`. `clock` counts
    seconds; `time_limit` bounds a request. For one event loop.

    Raises:
        ConfigurationError: `url` is none of a Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        largest: int = LARGEST,
        active: timedelta = timedelta(hours=24),
        paused: timedelta = timedelta(days=14),
        timeout: timedelta = timedelta(seconds=5),
        retry_after: timedelta = timedelta(seconds=5),
        clock: Callable[[], float] = time.monotonic,
        time_limit: Callable[[float], asyncio.Timeout] = asyncio.timeout,
    ) -> None:
        self._connection = RedisConnection(
            url,
            setting="agent.memory_url",
            unavailable=MemoryUnavailable,
            timeout=timeout,
            retry_after=retry_after,
            clock=clock,
            connections=_CONNECTIONS,
            time_limit=time_limit,
        )
        self._namespace = namespace
        self._largest = largest
        self.active, self.paused = active, paused

    @property
    def survives(self) -> bool:
        """True: it outlives the process."""
        return True

    async def open(self) -> None:
        """Check that Redis answers and takes writes."""
        await self._connection.check(_Names.of(self._namespace, new_id()).books[0])

    async def execute(self, owner: Owner, commands: Sequence[Command], *, seen: int = 0) -> tuple[int, list[Answer]]:
        """Do commands in one round trip; the version then, and what each answered.

        Raises:
            MemoryFenced: the memory has another owner by now, or one with a higher fence.
            MemoryLost: it has no owner or an earlier one, is older than `seen`, or a key that a command names was
                evicted: nothing is done.
            MemoryRefused: a command does not fit the type of its key, or its answer is too large; names the key.
                Earlier commands took effect.
            MemoryUnavailable: it is not known whether they are done.
        """
        names = self._names(owner.agent_id)
        for command in commands:
            if command.name not in READS | WRITES:
                raise MemoryRefused(f"memory key {command.key!r}: {command.name} is no command of a working memory")
            if not command.key:
                raise MemoryRefused(f"memory key '': {command.name} needs a key")
        places = {key: place for place, key in enumerate(dict.fromkeys(each.key for each in commands), start=3)}
        writes = b"w" if any(command.writes for command in commands) else b"r"
        life = self.active // _MILLISECOND
        args: list[bytes | int] = [*_claim(owner), seen, life, len(names.working) + 1, writes, self._largest]
        for command in commands:
            mode = b"w" if command.writes else b"r"
            args += [command.name.encode(), places[command.key], mode, len(command.args), *command.args]
        keys = (*names.books, *[names.working + key.encode() for key in places])
        [reply] = await self._repeat(names, [Call(EXECUTE, keys, tuple(args))])
        check(owner, reply)
        _, version, answers = reply
        return version, [_whole(command, answer) for command, answer in zip(commands, answers, strict=True)]

    async def keys(self, owner: Owner, *, seen: int = 0) -> list[str]:
        """The keys that are there. Raises as `execute`; MemoryLost also if any key was evicted."""
        names = self._names(owner.agent_id)
        args = (*_claim(owner), seen, names.working, self._largest)
        [reply] = await self._repeat(names, [Call(LIST_KEYS, names.books, args)])
        check(owner, reply)
        return [name_of(key) for key in reply[1] if key]

    async def read(self, agent_id: str) -> Held:
        """All that is there at one instant: one round trip, or two for more than 500 keys."""
        return await self._whole(self._names(agent_id), self._largest)

    async def _whole(self, names: _Names, limit: int) -> Held:
        for _ in range(READ_TRIES):
            replies = await self._read(names, 0, READ_KEYS - 1, limit)
            if parts := list(_ranks(replies[0][5], after=READ_KEYS)):
                each = limit // len(parts)
                replies += map(opened, await self._repeat(names, [_reading(names, *part, each) for part in parts]))
            found = held(replies)
            if found is not None and not (parts and found.large):
                return found
            if found is not None:  # one part exceeds its share of the limit
                break
        found = held(await self._read(names, 0, -1, limit))
        assert found is not None, "one reply is one instant"
        return found

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of what is there, if it still has this version: one round trip, or two as `read`.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """
        names = self._names(owner.agent_id)
        args = (*_claim(owner), version, self.active // _MILLISECOND, names.working, READ_KEYS - 1)
        [reply] = await self._repeat(names, [Call(ADOPT, names.books, args)])
        check(owner, reply)
        if reply[0] == b"ok":
            await self._retain(owner, self.active, _ranks(reply[1], after=READ_KEYS))
        return bool(reply[0] == b"ok")

    async def replace(
        self, owner: Owner, items: Sequence[Item], *, seen: int | None = None, force: bool = False
    ) -> Held:
        """Put `items` in place of all that is there, become the owner, and read them back.

        A few megabytes are one round trip. A failure at any point leaves the old memory, or the new one.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """
        items = [item for item in items if stays(item)]
        try:
            replies = await self._replace(owner, items, seen, force, known=True)
        except NoScriptError:
            replies = await self._replace(owner, items, seen, force, known=False)
        found = held(replies)
        if found is None:  # somebody wrote since
            found = await self._whole(self._names(owner.agent_id), self._limit_of(items))
        if found.run_id is not None and found.run_id != owner.run_id:
            raise fenced(owner, found.run_id, found.fence)
        return found

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Let the memory live as long as that of a paused, or of an active, task from now on.

        Nothing happens if another run with the same or a higher fence has it.
        """
        life = self.paused if paused else self.active
        if total := await self._retain(owner, life, [(0, READ_KEYS - 1)]):
            await self._retain(owner, life, _ranks(total, after=READ_KEYS))

    async def forget(self, owner: Owner) -> None:
        """Delete it, unless another run with the same or a higher fence has it."""
        names = self._names(owner.agent_id)
        [reply] = await self._repeat(names, [Call(FORGET, names.books, (*_claim(owner), names.working))])
        refuse_damaged(reply)

    async def close(self) -> None:
        """Release every connection."""
        await self._connection.close()

    def _names(self, agent_id: str) -> _Names:
        return _Names.of(self._namespace, agent_id)

    async def _read(self, names: _Names, first: int, last: int, limit: int) -> list[Reply]:
        return [opened(reply) for reply in await self._repeat(names, [_reading(names, first, last, limit)])]

    def _limit_of(self, items: Sequence[Item]) -> int:
        """Read limit for restored `items`: at least their size, as `largest` may have been higher when saved."""
        return max(self._largest, sum(map(weight_of, items)))

    async def _retain(self, owner: Owner, life: timedelta, ranks: Iterable[_Ranks]) -> int:
        """Let the keys with these ranks live for `life`.

        Returns:
            How many members the index has; 0: the memory is not the owner's.
        """
        names = self._names(owner.agent_id)
        args = (*_claim(owner), life // _MILLISECOND, names.working)
        calls = [Call(RETAIN, names.books, (*args, *some)) for some in ranks]
        replies = await self._repeat(names, calls) if calls else []
        for reply in replies:
            refuse_damaged(reply)
        return min([reply[1] if reply[0] == b"ok" else 0 for reply in replies], default=0)

    async def _replace(
        self, owner: Owner, items: Sequence[Item], seen: int | None, force: bool, *, known: bool
    ) -> list[Reply]:
        """Stage, swap and read back; the replies for what is there then."""
        names = self._names(owner.agent_id)
        staged = names.staged(owner)
        index, values = staged + b"index", staged + b"working:"
        batch: list[Call] = []
        size = count = 0
        for step in steps(items):
            call = Call(STAGE, (index,), (values, _STAGED // _MILLISECOND, step))
            if batch and size + call.size > script_calls.PIPELINE_BYTES:
                for reply in await self._run(names, batch, known=known):
                    check(owner, reply)
                batch, size = [], 0
            batch.append(call)
            size, count = size + call.size, count + 1
        staging = (names.working, values, count, len(items))
        conditions = (b"" if seen is None else seen, int(force))
        args = (*_claim(owner), self.active // _MILLISECOND, *staging, *conditions)
        ranks = list(_ranks(len(items) + 1))
        limit = self._limit_of(items)
        reads = [_reading(names, *some, limit) for some in ranks]
        replies = await self._run(names, [*batch, Call(SWAP, (*names.books, index), args), *reads], known=known)
        for reply in replies[: -len(reads)]:
            check(owner, reply)
        return [opened(reply) for reply in replies[-len(reads) :]]

    async def _run(self, names: _Names, calls: Sequence[Call], *, known: bool) -> list[Reply]:
        return await script_calls.run(self._connection, f"memory {names.agent_id}", calls, known=known)

    async def _repeat(self, names: _Names, calls: Sequence[Call]) -> list[Reply]:
        return await script_calls.repeat(self._connection, f"memory {names.agent_id}", calls)


def _claim(owner: Owner) -> tuple[bytes, int]:
    return owner.run_id.encode(), owner.fence


def _ranks(total: int, *, after: int = 0) -> Iterator[_Ranks]:
    """The ranks from `after` on of an index with `total` members, as many at a time as one call looks at."""
    for first in range(after, total, READ_KEYS):
        yield first, first + READ_KEYS - 1


def _reading(names: _Names, first: int, last: int, limit: int) -> Call:
    return Call(READ, names.books, (names.working, limit, first, last))


def _whole(command: Command, answer: Answer) -> Answer:
    """A number that is too long for a script comes as text."""
    exact = command.name in {"INCRBY", "HINCRBY"} and isinstance(answer, bytes)
    return int(answer) if exact else answer  # type: ignore[arg-type]
