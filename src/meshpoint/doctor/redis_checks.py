"""Findings about Redis. Only copies of checkpoints may be lost at any time."""

from __future__ import annotations

from meshpoint.doctor.facts import Facts
from meshpoint.doctor.findings import Finding, note, warning

_MEMORY = frozenset({"memory_url", "memory_snapshot_url"})
_KEEPS_ALL = "noeviction"


def check_redis(facts: Facts) -> list[Finding]:
    """Eviction and persistence where working memories are kept."""
    findings: list[Finding] = []
    for redis in facts.redis:
        names = [name for name in redis.settings if name in _MEMORY]
        if not names:
            continue
        where = " and ".join(names)
        eviction = redis.facts.eviction
        if eviction is None:
            problem = f"maxmemory-policy of {where} is unknown: the login may not run INFO"
            findings.append(
                note("redis.unknown", redis.url, problem, f"see that it is {_KEEPS_ALL}")
            )
        elif eviction != _KEEPS_ALL:
            problem = f"its maxmemory-policy is {eviction}: it may drop working memories ({where})"
            fix = (
                f"run: redis-cli CONFIG SET maxmemory-policy {_KEEPS_ALL}, and set it in its file"
            )
            findings.append(warning("redis.evicts", redis.url, problem, fix, policy=eviction))
        if redis.facts.is_persistent is False and _MEMORY.issubset(_kept_by(facts, redis.url)):
            problem = (
                f"it does not write to disk: a restart loses the working memories ({where}) and "
                "their snapshots, and tasks resume from the checkpoint in the database"
            )
            fix = "set appendonly yes, or use another server for memory_snapshot_url"
            findings.append(warning("redis.not_persistent", redis.url, problem, fix))
    return findings


def _kept_by(facts: Facts, url: str) -> set[str]:
    """What the Redis at `url` keeps. Without a URL of their own, snapshots are with the memory."""
    kept = {name for redis in facts.redis if redis.url == url for name in redis.settings}
    is_shared = any(
        release.settings.memory_url is not None and release.settings.memory_snapshot_url is None
        for release in facts.releases
    )
    return kept | {"memory_snapshot_url"} if is_shared and "memory_url" in kept else kept
