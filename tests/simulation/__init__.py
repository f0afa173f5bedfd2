"""The whole worker on a simulated event loop, broker and database, all driven by one seed.

Real code: `meshpoint.engine`, the protocol of `meshpoint.agents`, `meshpoint.model`, and the
in-process adapters, which act as the broker's server and the database. Simulated: the event loop
and its time (`loop`), the network to both servers (`weather`, `wire`), and processes that are
killed and frozen (`replicas`).

Not covered: the SQL, SQLite and RabbitMQ adapters, and the thread that renews leases. Here renewal
is a task in the process: it freezes with its process as in reality, but agent code that blocks the
loop would block it too.
"""
