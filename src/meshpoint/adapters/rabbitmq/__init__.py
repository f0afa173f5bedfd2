"""Messages over RabbitMQ 3.10 and later.

Two connections per process, so that a broker that holds back publishers still takes acknowledgements; a
channel for publishing, one per consumer, and one for each queue lookup, so that an error on one channel does
not close the others. aio-pika manages connections and topology; messages use the aiormq channels underneath.
Their frames are read and written here (`frames.py`): the library's decoder closes the connection over a single
malformed message, and doubles the cost of each message.
"""

from meshpoint.adapters.rabbitmq.broker import RabbitMqBroker
from meshpoint.adapters.rabbitmq.connection import connect

__all__ = ["RabbitMqBroker", "connect"]
