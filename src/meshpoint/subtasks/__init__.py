"""Subtasks of a task: their versions, inputs, deliverables and checkpoints, and migrations."""
