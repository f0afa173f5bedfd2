"""What a task remembers within a segment: versions, inputs and deliverables of its subtasks, and their migration."""
