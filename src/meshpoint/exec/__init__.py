"""Run one agent once in the foreground: `meshpoint exec`.

Each run is an attempt of a session. A session is one operation, in its own namespace of an
embedded store. It can be resumed any number of times: recorded steps that have not changed do not
run again.

- `sessions` stores the sessions (`session`) and gives each to one process at a time (`locks`).
- `attempt` runs one attempt on the embedded store (`embedded`); `report` tracks its steps.
- `checkpoint_file` defines exported checkpoints; `importing` turns one into a session.
"""
