"""The life of a task, from the broker to agent code and back. Start with `engine.worker`."""
