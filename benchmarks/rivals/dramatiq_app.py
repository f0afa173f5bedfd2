"""The job as dramatiq actors. The root starts a group of its peers; its callback collects."""

from __future__ import annotations

import json
import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as RedisRateLimiter
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.rivals import job

_URL = os.environ["DRAMATIQ_URL"]
_STATE_SECONDS = 600

broker = RedisBroker(url=_URL)
results = RedisBackend(url=_URL)
# In this order, because the last one added is the first to act after a message: a peer's result
# is there before the callback that reads it.
broker.add_middleware(GroupCallbacks(RedisRateLimiter(url=_URL)))
broker.add_middleware(Results(backend=results))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def peer(question: str) -> str:
    """Answer at once."""
    return job.answer()


@dramatiq.actor(store_results=True)
def collect(job_id: str) -> str:
    """Continue with the root's state after all peers have answered.

    The state is a key, because a group would copy it into the message of each peer.
    """
    state: dict[str, Any] = json.loads(broker.client.getdel(_state_key(job_id)))
    return job.summary([_message(peer, each).get_result() for each in state["calls"]])


@dramatiq.actor
def root(fan_out: int, job_id: str) -> None:
    """Ask `fan_out` peers. The result is `collect`'s, whose message has the id `job_id`."""
    calls = [peer.message(job.QUESTION) for _ in range(fan_out)]
    state = {"history": job.history(), "calls": [call.message_id for call in calls]}
    broker.client.set(_state_key(job_id), json.dumps(state), ex=_STATE_SECONDS)
    group = dramatiq.group(calls)
    group.add_completion_callback(_message(collect, job_id, job_id))
    group.run()


def result_of(job_id: str, timeout_seconds: float) -> object:
    """The job's result, once it is there."""
    return _message(collect, job_id).get_result(block=True, timeout=int(timeout_seconds * 1000))


def _message(actor: Any, message_id: str, *arguments: Any) -> Any:
    return actor.message(*arguments).copy(message_id=message_id)


def _state_key(job_id: str) -> str:
    return f"bench-state:{job_id}"
