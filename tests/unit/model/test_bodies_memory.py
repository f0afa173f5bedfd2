"""Parsing a message must not retain any of it in the process."""

from __future__ import annotations

import gc
import sys

from meshpoint.model.bodies import A2AMessage, Part, RequestBody, parse_body
from meshpoint.model.ids import new_id


def test_ids_used_once_are_not_cached() -> None:
    bodies = [_response_body() for _ in range(4000)]
    for body in bodies[:2000]:
        parse_body(RequestBody, body)
    cached = _cached_strings()
    for body in bodies[2000:]:
        parse_body(RequestBody, body)
    assert _cached_strings() - cached < 200


def _response_body() -> bytes:
    message = A2AMessage(
        message_id=new_id(), role="ROLE_USER", parts=[Part(data=1)], task_id=new_id()
    )
    return RequestBody(message=message).to_bytes()


def _cached_strings() -> int:
    gc.collect()
    return sys.getallocatedblocks()
