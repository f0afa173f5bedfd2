"""Tests of agents in virtual time; in `conformance`, test suites for adapters and agents."""

from __future__ import annotations

from meshpoint.testing.crash_points import CrashPoint
from meshpoint.testing.errors import CrashChanges, CrashMissed, MeshIdle, ReplayDiffers
from meshpoint.testing.fixture import mesh_fixture
from meshpoint.testing.history import ReplayReport, replay_history
from meshpoint.testing.matrix import CrashReport, CrashRun, crash_matrix
from meshpoint.testing.mesh import TestMesh
from meshpoint.testing.stub import Failure, Stub

__all__ = [
    "CrashChanges",
    "CrashMissed",
    "CrashPoint",
    "CrashReport",
    "CrashRun",
    "Failure",
    "MeshIdle",
    "ReplayDiffers",
    "ReplayReport",
    "Stub",
    "TestMesh",
    "crash_matrix",
    "mesh_fixture",
    "replay_history",
]
