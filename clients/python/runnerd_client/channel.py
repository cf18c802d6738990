"""What the synchronous and the asynchronous client share about the connection."""

from __future__ import annotations

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where ``runnerd serve`` listens. A unix socket is ``unix:/path/of/the.sock``."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # an answer with log-probabilities of a long prompt exceeds gRPC's default of 4 MiB
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # notice a server that vanished while a stream waits for its next token
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
