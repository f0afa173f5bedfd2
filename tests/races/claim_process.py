"""Claims on command: `claim_process.py URL REPLICA`, then the claims as JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import Replica
from meshpoint.model.transitions import Claim, JoinCompleted


async def main(url: str, name: str) -> None:
    store = SqlStore(url, namespace="test", lock_timeout=timedelta(seconds=30))
    await store.open()
    print("ready", flush=True)
    calls: list[tuple[str, str]] = json.loads(await asyncio.to_thread(sys.stdin.readline))
    replica = Replica(
        ReplicaId(name), AgentName("travel"), frozenset({"travel/1"}), timedelta(seconds=15)
    )
    claims = [
        Claim(RunId(new_id()), TaskId(task), TaskId(call), Ok(name), sender="flights")
        for task, call in calls
    ]
    arrivals = await asyncio.gather(*(store.claim([claim], replica, 1) for claim in claims))
    for (arrival,) in arrivals:
        outcomes = len(arrival.task.outcomes) if isinstance(arrival, JoinCompleted) else 0
        print(json.dumps([type(arrival).__name__, arrival.task_id, outcomes]))
    await store.close()


asyncio.run(main(*sys.argv[1:]))
