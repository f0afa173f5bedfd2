"""Copies of checkpoints in Redis 6 and later, for fast restores."""

from meshpoint.adapters.redis.checkpoint_cache import RedisCheckpointCache

__all__ = ["RedisCheckpointCache"]
