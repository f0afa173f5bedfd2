"""Parsing a message must not retain any of it in the process."""

from __future__ import annotations

import gc
import sys

from meshpoint.model.bodies import A2AMessage, Part, RequestBody, parse
from meshpoint.model.ids import new_id


def test_ids_that_come_once_are_not_kept() -> None:
    bodies = [_body() for _ in range(4000)]
    for body in bodies[:2000]:
        parse(RequestBody, body)
    kept = _kept()
    for body in bodies[2000:]:
        parse(RequestBody, body)
    assert _kept() - kept < 200


def _body() -> bytes:
    message = A2AMessage(role="ROLE_USER", parts=[Part(data=1)], task_id=new_id())
    return RequestBody(message=message).to_bytes()


def _kept() -> int:
    gc.collect()
    return sys.getallocatedblocks()
