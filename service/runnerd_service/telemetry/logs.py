"""Log lines for people, or as JSON for machines: one object per line.

A line about a request carries its name as ``request_id``; no line carries a prompt or an output.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from runnerd_service.telemetry.standard_error import take_standard_error

LogFormat = Literal["text", "json"]

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_GRPC_CORE = "grpc._cython.cygrpc"
_FIELDS = "fields"
_MAX_NAME_CHARACTERS = 128


class JsonFormatter(logging.Formatter):
    """Gives a record as a JSON object in one line.

    Its keys are ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, those of :func:`with_fields`, and
    ``exception`` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, _FIELDS, {}).items():
            told.setdefault(name, value)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def printable(name: str) -> str:
    """Give a name that a client chose as the log can hold it: within a line, and no longer than a name may be."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in name[:_MAX_NAME_CHARACTERS])


def with_fields(**fields: object) -> dict[str, object]:
    """Give the ``extra`` of a log call that makes these keys of its JSON object; None values are left out."""
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send log lines of at least ``level`` to standard error; to be called by the owner of the process only.

    As JSON, all else that comes to standard error becomes a line of the log, too, once and for all.
    """
    if log_format == "json":
        handler: logging.Handler = logging.StreamHandler(take_standard_error())
        handler.setFormatter(JsonFormatter())
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_TEXT_FORMAT))
    handler.addFilter(_has_no_metadata)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _has_no_metadata(record: logging.LogRecord) -> bool:
    """Whether a record is none of gRPC's about metadata that is no UTF-8, which it shows and takes for Latin-1."""
    return not (record.name == _GRPC_CORE and str(record.msg).startswith("Invalid encoding"))


def logs_json() -> bool:
    """Whether this process has been told to log JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
