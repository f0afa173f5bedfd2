"""The corridor from the broker to agent code and back. Begin with `worker.worker`."""

from meshpoint.worker.worker import Worker

__all__ = ["Worker"]
