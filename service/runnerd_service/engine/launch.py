"""What the front process hands to the engine process when it starts it: one line of JSON on its standard input."""

from __future__ import annotations

import msgspec

from runnerd_service.config import EngineConfig


class Launch(msgspec.Struct, frozen=True):
    """The engine process's configuration and where it reports."""

    config: EngineConfig
    address: str
    """ZeroMQ address that the front process has bound."""
    log_level: int
