"""Adapters for Redis 6 and later: working memory, its snapshots, and cached checkpoints."""

from meshpoint.adapters.redis.checkpoint_cache import RedisCheckpointCache
from meshpoint.adapters.redis.snapshots import RedisSnapshotStore
from meshpoint.adapters.redis.working_memory import RedisWorkingMemory

__all__ = ["RedisCheckpointCache", "RedisSnapshotStore", "RedisWorkingMemory"]
