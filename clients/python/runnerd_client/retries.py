"""Which calls gRPC itself makes again when the server cannot be reached, as a service config.

Only those that do the same when they are made twice: questions, and Abort. A stream is one of them until its first
message has come, which says that the request was accepted; from then on gRPC gives an error to the caller. Generate is
none: its single answer comes at the end, and a connection that breaks before would cost the whole generation again.
Nothing is made again because a server is full (RESOURCE_EXHAUSTED): that is for the caller, by ``retry_after``.
"""

from __future__ import annotations

import json

RETRIED_METHODS = (
    ("runnerd.v1.InferenceService", "StreamGenerate"),
    ("runnerd.v1.InferenceService", "Abort"),
    ("runnerd.v1.InferenceService", "Tokenize"),
    ("runnerd.v1.InferenceService", "Detokenize"),
    ("runnerd.v1.ModelService", "GetModelInfo"),
    ("runnerd.v1.ServerService", "GetServerInfo"),
    ("runnerd.v1.ServerService", "GetLoad"),
    ("runnerd.v1.ServerService", "ListRunners"),
)
MAX_ATTEMPTS = 4
"""The first one included; between them up to 0.1, 0.2 and 0.4 s pass."""

SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": service, "method": method} for service, method in RETRIED_METHODS],
                "retryPolicy": {
                    "maxAttempts": MAX_ATTEMPTS,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
