"""The caller's side: start tasks from outside the mesh, follow them, and get their results.

- `mesh.py` is the connection that callers use, `task_handle.py` one task that it started.
- `requests.py` checks the options of a request and builds its message.
- `transport.py` sends requests and routes what agents answer to open tasks (`open_task.py`).
- `attachment.py` decides when to ask an agent for the outcome of a task.
- `updates.py` defines what `TaskHandle.updates` yields.
- `reply_counter.py` counts repeated replies, for tests and the demo.
"""
