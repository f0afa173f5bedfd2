"""The seed design for working memories: key by key, as JSON with a hash.

It follows the source document except where that could not run: the document's digest includes
times to live but its verification does not, so here both omit them; and bytes are stored as
latin-1 text, because JSON has no bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from redis.asyncio import Redis

_DAY = 24 * 3600


class SeedMemory:
    """Copies `L1:{agent_id}:working:*` to `l1_snapshot:{agent_id}` and back."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # returns bytes only, which its types do not say

    async def snapshot(self, agent_id: str) -> str:
        """Read, digest and store the memory; return the digest."""
        snapshot = await self._dump(agent_id)
        digest = self._digest(snapshot)
        await self._redis.set(f"l1_snapshot:{agent_id}", json.dumps(snapshot), ex=14 * _DAY)
        meta = {"hash": digest, "key_count": len(snapshot)}
        await self._redis.set(f"l1_snapshot_meta:{agent_id}", json.dumps(meta), ex=14 * _DAY)
        return digest

    async def restore(self, agent_id: str) -> int:
        """Clear, write and verify the memory; return the number of keys."""
        stored = await self._redis.get(f"l1_snapshot:{agent_id}")
        meta = await self._redis.get(f"l1_snapshot_meta:{agent_id}")
        assert stored
        assert meta
        snapshot = json.loads(stored)
        if existing := await self._redis.keys(f"L1:{agent_id}:working:*"):
            await self._redis.delete(*existing)
        for name, stored_keys in snapshot.items():
            key = f"L1:{agent_id}:working:{name}"
            await self._write(key, stored_keys["type"], stored_keys["value"])
            await self._redis.expire(key, _DAY)
        assert self._digest(await self._dump(agent_id)) == json.loads(meta)["hash"]
        return len(snapshot)

    async def _dump(self, agent_id: str) -> dict[str, Any]:
        prefix = f"L1:{agent_id}:working:"
        snapshot = {}
        for key in await self._redis.keys(f"{prefix}*"):
            kind = (await self._redis.type(key)).decode()
            snapshot[key.decode().removeprefix(prefix)] = {
                "value": await self._read(key, kind),
                "type": kind,
                "ttl": await self._redis.ttl(key),
            }
        return snapshot

    async def _read(self, key: bytes, kind: str) -> Any:
        match kind:
            case "string":
                return _text(await self._redis.get(key))
            case "list":
                return [_text(value) for value in await self._redis.lrange(key, 0, -1)]
            case "hash":
                return {
                    _text(field): _text(value)
                    for field, value in (await self._redis.hgetall(key)).items()
                }
            case "set":
                return sorted(_text(member) for member in await self._redis.smembers(key))
            case "zset":
                return [
                    [_text(member), score]
                    for member, score in await self._redis.zrange(key, 0, -1, withscores=True)
                ]
        raise ValueError(kind)

    async def _write(self, key: str, kind: str, value: Any) -> None:
        match kind:
            case "string":
                await self._redis.set(key, value.encode("latin-1"))
            case "list":
                await self._redis.rpush(key, *[item.encode("latin-1") for item in value])
            case "hash":
                await self._redis.hset(
                    key,
                    mapping={k.encode("latin-1"): v.encode("latin-1") for k, v in value.items()},
                )
            case "set":
                await self._redis.sadd(key, *[each.encode("latin-1") for each in value])
            case "zset":
                await self._redis.zadd(
                    key, {member.encode("latin-1"): score for member, score in value}
                )

    @staticmethod
    def _digest(snapshot: dict[str, Any]) -> str:
        hasher = {
            name: {"value": stored_value["value"], "type": stored_value["type"]}
            for name, stored_value in snapshot.items()
        }
        return hashlib.sha256(json.dumps(hasher, sort_keys=True).encode()).hexdigest()


def _text(value: bytes) -> str:
    return value.decode("latin-1")
