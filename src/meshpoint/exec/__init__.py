"""One agent once, in the foreground: `meshpoint exec`.

Each run is an attempt of a session. A session is one operation, in a namespace of its own of an embedded store. It is
resumed as often as it takes: what was recorded and has not changed does not run again.

- `sessions` keeps the sessions (`session`), and hands each to one process at a time (`locks`);
- `running` runs one attempt (`attempt`) on the embedded store (`embedded`), and `report` tells of its steps;
- `checkpoint_file` is what is exported, `importing` makes a session of it;
"""
