"""Messages over RabbitMQ 3.10 and later.

Two connections per process, so that a broker that holds back publishers still takes acknowledgements; a
channel for publishing, one per consumer, and one for each look at a queue, so that an error in one ends none
of the others. Connections and topology are aio-pika's, and the channels of messages are the aiormq channels
underneath. The frames of messages are read and written here (`frames.py`): the library's decoder ends the
connection for one odd message, and costs as much again.
"""

from meshpoint.adapters.rabbitmq.broker import RabbitMqBroker
from meshpoint.adapters.rabbitmq.link import connect

__all__ = ["RabbitMqBroker", "connect"]
