"""What a user may set for one agent, with its default. `meshpoint.settings` reads it from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum


class AckPolicy(StrEnum):
    """When a request is acked: at the end of its first segment, or as soon as its row is written."""

    AT_CHECKPOINT = "at_checkpoint"
    ON_RECEIPT = "on_receipt"


class OnCheckpointFailure(StrEnum):
    """What becomes of a task whose first checkpoint certainly did not commit."""

    KEEP_IN_MEMORY = "keep_in_memory"
    WAIT = "wait"


class OnLostOwner(StrEnum):
    """What becomes of an operation whose replica died while it ran."""

    TAKE_OVER = "take_over"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One agent's limits and durations."""

    stateless_checkpointing: bool = False
    max_concurrency: int = 10  # segments that run at a time in one replica
    max_in_memory: int = 100  # paused tasks that one replica holds in memory
    max_call_depth: int = 10
    max_fan_out: int = 1000  # maximum calls of one pause
    request_shards: int = 1  # number of request queues, chosen by sender
    max_attempts: int = 5  # runs of one segment that may end in the death of their process
    max_message_bytes: int = 10_000_000
    max_join_bytes: int = 2_000_000_000  # limit for all outcomes of one pause; a task above it fails
    peer_timeout: timedelta = timedelta(minutes=10)
    deadline_margin: timedelta = timedelta(milliseconds=500)  # a peer's deadline is this much before its caller's
    lease: timedelta = timedelta(seconds=15)
    renew_interval: timedelta = timedelta(seconds=5)
    sweep_interval: timedelta = timedelta(seconds=1)
    sweep_batch: int = 100
    settle_time: timedelta = timedelta(seconds=1)  # after a start or an outage, before deadlines are enforced
    response_prefetch: int = 100
    checkpoint_retry_time: timedelta = timedelta(seconds=5)  # how long a first checkpoint is tried before memory
    reply_retry_time: timedelta = timedelta(seconds=30)  # how long an unroutable reply is tried
    incompatible_pause: timedelta = timedelta(seconds=5)  # before a state that could not be read is offered again
    drain_timeout: timedelta = timedelta(seconds=30)
    release_timeout: timedelta = timedelta(seconds=5)  # after it, for giving tasks back
    startup_timeout: timedelta = timedelta(seconds=30)
    begin_at_delivery: int = 3  # from this delivery on, a task is written as running before it runs
    ack_policy: AckPolicy = AckPolicy.AT_CHECKPOINT
    on_checkpoint_failure: OnCheckpointFailure = OnCheckpointFailure.KEEP_IN_MEMORY
    isolated_stall: timedelta = timedelta(minutes=5)  # how long the event loop of a task's own process may block
    on_lost_owner: OnLostOwner = OnLostOwner.TAKE_OVER
    secret_keys: tuple[str, ...] = ()  # whose values are masked in what is kept of a failure, beside the usual ones
    memory_max_bytes: int = 64 * 1024 * 1024  # of one task's working memory
    memory_keep: bool = False  # after a task has completed, until its time is over
    app_version: str | None = None
    # broker logins allowed for each sender name
    peer_logins: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    operator_logins: tuple[str, ...] = ()  # logins that may cancel and resume any task by message
