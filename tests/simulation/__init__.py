"""The whole worker on a simulated event loop, broker and database: everything that happens follows from a seed.

What is real: `meshpoint.engine`, `meshpoint.engine`, `meshpoint.agents`' protocol, `meshpoint.model`, and the
memory adapters, which stand in for the broker's server and for the database. What is simulated: the event loop and
its time (`loop`), the network to both servers (`weather`, `wire`), processes that are killed and frozen (`replicas`).

Not covered: the SQL, SQLite and RabbitMQ adapters, and the thread that renews leases (here it is a task of the same
process: it is frozen with its process, but agent code that blocks the loop would block it too).
"""
