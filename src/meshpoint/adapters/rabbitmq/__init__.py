"""Messages over RabbitMQ 3.10 and later.

A process has two connections, so that a broker that blocks publishers still accepts
acknowledgements. Publishing, each consumer and each queue lookup have a channel of their own, so
an error on one channel does not close the others. aio-pika manages connections and topology;
messages use the aiormq channels underneath. Their frames are read and written here (`frames.py`),
because the library's decoder closes the connection over a single malformed message and doubles the
cost of each message.
"""

from meshpoint.adapters.rabbitmq.broker import RabbitMqBroker
from meshpoint.adapters.rabbitmq.connection import connect

__all__ = ["RabbitMqBroker", "connect"]
