"""Find where code reads clocks, draws random numbers or creates ids."""

from __future__ import annotations

import asyncio
import datetime
import gc
import random
import secrets
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from meshpoint.model.context import TaskExecutionContext

_CLOCKS = frozenset(
    {
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("datetime", "today"),
        ("date", "today"),
        ("time", "time"),
        ("time", "time_ns"),
        ("time", "monotonic"),
        ("time", "perf_counter"),
    }
)
_IDS = frozenset({uuid.uuid1.__code__, uuid.uuid4.__code__})
_RANDOM_FILES = {random.__file__: "random", secrets.__file__: "secrets"}
_STDLIB = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_MAX_PLACES = 5


@contextmanager
def find_nondeterminism() -> Iterator[list[str]]:
    """List the places at which the calling asyncio task reads clocks, random numbers or new ids.

    A place looks like `travel.py:31: uuid.uuid4() → ctx.uuid4()`. Replaces the profiler of this
    thread while its block runs. Leaves out what runs because garbage is collected, which may be
    anywhere.
    """
    places: list[str] = []
    is_collecting = False
    task, previous = asyncio.current_task(), sys.getprofile()

    def begin_collection(phase: str, _: object) -> None:
        nonlocal is_collecting
        is_collecting |= phase == "start"

    def end_collection(phase: str, _: object) -> None:
        nonlocal is_collecting
        is_collecting &= phase != "stop"

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if is_collecting:
            return
        found = _find_call(frame, event, argument)
        if found is None or len(places) >= _MAX_PLACES or asyncio.current_task() is not task:
            return
        caller, called, advice = found
        if not _is_users(caller):
            return
        name = Path(caller.f_code.co_filename).name
        place = f"{name}:{caller.f_lineno}: {called}() → {advice}"
        if place not in places:
            places.append(place)

    gc.callbacks.insert(0, begin_collection)  # before and after all others
    gc.callbacks.append(end_collection)
    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(previous)
        gc.callbacks.remove(begin_collection)
        gc.callbacks.remove(end_collection)


def _find_call(frame: FrameType, event: str, argument: Any) -> tuple[FrameType, str, str] | None:
    """The caller, the function and what to write instead. `None` for other calls."""
    if event == "c_call":
        return _find_builtin(frame, argument)
    if event != "call" or frame.f_back is None:
        return None
    code = frame.f_code
    if code in _IDS:
        return frame.f_back, f"uuid.{code.co_name}", _advise("uuid4")
    module = _RANDOM_FILES.get(code.co_filename)
    if module is None or frame.f_back.f_code.co_filename == code.co_filename:
        return None
    if module == "random" and frame.f_locals.get("self") is not random._inst:
        return None  # a generator of its own, with a seed perhaps
    return frame.f_back, f"{module}.{code.co_name}", _advise("random")


def _find_builtin(frame: FrameType, called: Any) -> tuple[FrameType, str, str] | None:
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if isinstance(owner, type):
        is_time = issubclass(owner, datetime.date)
        owner_name = "datetime" if issubclass(owner, datetime.datetime) else "date"
        if is_time and (owner_name, name) in _CLOCKS:
            return frame, f"{owner_name}.{name}", _advise("now")
        return None
    module = getattr(called, "__module__", None)
    if module is None and isinstance(owner, type(sys)):
        module = owner.__name__
    if ("time", name) in _CLOCKS and module == "time":
        return frame, f"time.{name}", _advise("now")
    if name == "urandom":
        return frame, "os.urandom", _advise("random")
    if owner is random._inst:
        return frame, f"random.{name}", _advise("random")
    return None


def _advise(method: str) -> str:
    return f"ctx.{method}()" if hasattr(TaskExecutionContext, method) else "ctx.step(…)"


def _is_users(frame: FrameType) -> bool:
    """Whether the code of `frame` is neither the standard library's nor Meshpoint's."""
    path = frame.f_code.co_filename
    if path.startswith((_OWN, "<frozen")):
        return False
    return not path.startswith(_STDLIB) or "site-packages" in path
