"""Findings about databases, Redis and clocks."""

from __future__ import annotations

from datetime import timedelta

from pydantic import JsonValue

from meshpoint.doctor.facts import ClockOffset, DatabaseFacts, Facts
from meshpoint.doctor.findings import CONFIG, Finding, error, note, warning
from meshpoint.model.ids import AgentName
from meshpoint.ports.inspection import SchemaFacts
from meshpoint.settings import AgentSettings, database_key
from meshpoint.settings.urls import redact_url

_MAX_OFFSET = timedelta(seconds=1)
_MEMORY = frozenset({"memory_url", "memory_snapshot_url"})
_KEEPS_ALL = "noeviction"


def check_databases(facts: Facts) -> list[Finding]:
    """Schemas, privileges and disks of the databases that answered."""
    findings: list[Finding] = []
    configured = {each.settings.session_db_url for each in facts.releases}
    for url, database in facts.databases.items():
        option = f"--config {CONFIG}" if url in configured else "--db URL"
        if database.schema is not None:
            findings += _check_schema(database, database.schema, option)
        if database.problem is not None:
            fix = "grant SELECT, INSERT, UPDATE and DELETE on all tables of Meshpoint to the role"
            findings.append(error("database.login", database.url, database.problem, fix))
        if database.is_full:
            problem = "its disk is full: tasks cannot pause or end"
            fix = "make room on the disk, or enlarge it; do not delete rows or files by hand"
            findings.append(error("database.full", database.url, problem, fix))
    return findings


def check_database_keys(facts: Facts) -> list[Finding]:
    """What `database_url` stands for in each agent."""
    mesh_url = facts.settings.mesh.database_url
    findings: list[Finding] = []
    for release in facts.releases:
        agent = release.settings
        section, url = (
            ("mesh", mesh_url) if agent.database_url is None else ("agent", agent.database_url)
        )
        if url is not None:
            findings.append(_expansion(release.name, f"{section}.database_url", url, agent))
    return findings


def _expansion(name: AgentName, key: str, url: str, agent: AgentSettings) -> Finding:
    """Show the long keys of `agent`, and which of them it sets to other values itself."""
    if not agent.has_database:
        return note("database.keys", name, f"{key} is not used: session_service is memory")
    shown: dict[str, JsonValue] = {}
    parts: list[str] = []
    for long_key, meant in database_key.expand(url).items():
        value = getattr(agent, long_key)
        shown[long_key] = redact_url(value) if long_key == "session_db_url" else value
        text = str(value).lower() if isinstance(value, bool) else shown[long_key]
        parts.append(f"{long_key}: {text}" + ("" if value == meant else " (set for the agent)"))
    return note("database.keys", name, f"{key} means {', '.join(parts)}", "", **shown)


def _check_schema(database: DatabaseFacts, schema: SchemaFacts, option: str) -> list[Finding]:
    data = {"revision": schema.revision, "required": schema.required}
    upgrade = f"run: meshpoint db upgrade {option}"
    if schema.is_missing and schema.creates_itself:
        return [note("schema.new", database.url, "has no tables: the first replica creates them")]
    if schema.is_missing:
        return [error("schema.missing", database.url, "has no tables", upgrade, **data)]
    if schema.is_behind:
        problem = (
            f"its tables are at revision {schema.revision}, this release needs {schema.required}"
        )
        fix = f"{upgrade}; replicas of the earlier release keep running"
        return [error("schema.behind", database.url, problem, fix, **data)]
    if schema.is_newer:
        problem = (
            f"its tables are at revision {schema.revision} of a later release; "
            f"this release ({schema.required}) runs on them"
        )
        fix = (
            "if you need the earlier tables back: with the later release, after its last replica "
            f"has stopped, run: meshpoint db downgrade {schema.required} {option}"
        )
        return [note("schema.newer", database.url, problem, fix, **data)]
    return []


def check_clocks(facts: Facts) -> list[Finding]:
    """Clocks of servers that differ from this host's by more than a second."""
    offsets = [(database.url, database.clock) for database in facts.databases.values()]
    offsets += [(redis.url, redis.clock) for redis in facts.redis]
    return [
        _clock_finding(server, clock)
        for server, clock in offsets
        if clock is not None and abs(clock.offset) - clock.error > _MAX_OFFSET
    ]


def _clock_finding(server: str, clock: ClockOffset) -> Finding:
    seconds = clock.offset.total_seconds()
    direction = "ahead of" if seconds > 0 else "behind"
    problem = f"its clock is {abs(seconds):.1f} s {direction} this host's"
    fix = "synchronize both clocks, for example with chrony"
    return warning("clock.apart", server, problem, fix, seconds=round(seconds, 3))


def check_redis(facts: Facts) -> list[Finding]:
    """Eviction and persistence where working memories are kept; copies may be lost."""
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
