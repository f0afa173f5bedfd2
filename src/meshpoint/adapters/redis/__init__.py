"""What Redis 6 and later keeps: working memories, their snapshots, and copies of checkpoints for fast restores."""

from meshpoint.adapters.redis.checkpoint_cache import RedisCheckpointCache
from meshpoint.adapters.redis.snapshots import RedisSnapshotStore
from meshpoint.adapters.redis.working_memory import RedisWorkingMemory

__all__ = ["RedisCheckpointCache", "RedisSnapshotStore", "RedisWorkingMemory"]
