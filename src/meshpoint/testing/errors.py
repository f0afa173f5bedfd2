"""What a `TestMesh` raises. All are assertion errors: the test fails."""

from __future__ import annotations


class MeshIdle(AssertionError):
    """A test waits for something that never happens.

    Nothing runs, nothing is due, and the message names what the tasks wait for.
    """


class CrashMissed(AssertionError):
    """No replica reached a planned crash."""


class CrashChanges(AssertionError):
    """`crash_matrix` found crashes that change what a task does. The message names each."""


class ReplayDiffers(AssertionError):
    """Agent code did something else when it ran again with the same outcomes."""
