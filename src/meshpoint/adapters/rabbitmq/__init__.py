"""Messages over RabbitMQ 3.10 and later.

Two connections per process, so that a broker that holds back publishers still takes acknowledgements; a
channel for publishing, one per consumer, and one for each look at a queue, so that an error in one ends none
of the others. Built on aiormq, the protocol core of aio-pika: aio-pika's robust objects hide lost channels
from consumers, and its message objects cost a quarter of the throughput.
"""

from meshpoint.adapters.rabbitmq.broker import RabbitMqBroker
from meshpoint.adapters.rabbitmq.link import connect

__all__ = ["RabbitMqBroker", "connect"]
