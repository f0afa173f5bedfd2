"""Settings of one agent with their defaults, read from YAML by `meshpoint.settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum


class AckPolicy(StrEnum):
    """When to ack a request: at the end of its first segment, or once its row is written."""

    AT_CHECKPOINT = "at_checkpoint"
    ON_RECEIPT = "on_receipt"


class OnCheckpointFailure(StrEnum):
    """What to do with a task whose first checkpoint certainly did not commit."""

    KEEP_IN_MEMORY = "keep_in_memory"
    WAIT = "wait"


class OnLostOwner(StrEnum):
    """What to do with an operation whose replica died while running it."""

    TAKE_OVER = "take_over"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Limits and durations of one agent."""

    stateless_checkpointing: bool = False
    max_concurrency: int = 10  # segments running concurrently in one replica
    max_in_memory: int = 100  # paused tasks kept in memory by one replica
    max_call_depth: int = 10
    max_fan_out: int = 1000  # maximum calls of one pause
    request_shards: int = 1  # number of request queues, chosen by sender
    max_attempts: int = 5  # runs of one segment that may crash their process
    max_message_bytes: int = 10_000_000
    max_join_bytes: int = 2_000_000_000  # all outcomes of one pause; the task fails if exceeded
    peer_timeout: timedelta = timedelta(minutes=10)
    # a peer's deadline is this much before its caller's
    deadline_margin: timedelta = timedelta(milliseconds=500)
    lease: timedelta = timedelta(seconds=15)
    renew_interval: timedelta = timedelta(seconds=5)
    sweep_interval: timedelta = timedelta(seconds=1)
    sweep_batch: int = 100
    # after a start or an outage, before deadlines are enforced
    settle_time: timedelta = timedelta(seconds=1)
    response_prefetch: int = 100
    # how long a first checkpoint is retried before the task stays in memory
    checkpoint_retry_time: timedelta = timedelta(seconds=5)
    reply_retry_time: timedelta = timedelta(seconds=30)  # retry time of an unroutable reply
    # before a task whose state could not be read is offered again
    incompatible_pause: timedelta = timedelta(seconds=5)
    drain_timeout: timedelta = timedelta(seconds=30)
    release_timeout: timedelta = timedelta(seconds=5)  # after drain_timeout, for releasing tasks
    startup_timeout: timedelta = timedelta(seconds=30)
    begin_at_delivery: int = 3  # delivery count from which a task's row is written before it runs
    ack_policy: AckPolicy = AckPolicy.AT_CHECKPOINT
    on_checkpoint_failure: OnCheckpointFailure = OnCheckpointFailure.KEEP_IN_MEMORY
    # how long an isolated task may block its event loop
    isolated_stall: timedelta = timedelta(minutes=5)
    on_lost_owner: OnLostOwner = OnLostOwner.TAKE_OVER
    # keys whose values are masked in stored failures, in addition to the built-in ones
    secret_keys: tuple[str, ...] = ()
    memory_max_bytes: int = 64 * 1024 * 1024  # limit of one task's working memory
    memory_keep: bool = False  # keep it after completion until its time to live ends
    app_version: str | None = None
    # broker logins allowed for each sender name
    peer_logins: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    operator_logins: tuple[str, ...] = ()  # broker logins that may cancel and resume any task
