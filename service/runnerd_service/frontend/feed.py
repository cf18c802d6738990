"""What engines give one output, on its way to the reader: whoever keeps count of outputs is told first."""

from __future__ import annotations

from runnerd_service.engine.messages import RequestOutput
from runnerd_service.frontend.live import LiveRequests
from runnerd_service.frontend.output import OutputBuffer
from runnerd_service.frontend.stream import RequestStream
from runnerd_service.frontend.supervisor import EngineSupervisor
from runnerd_service.telemetry.requests import OutputMeter


class OutputFeed:
    """Takes what engines give one output; it is called with each of its steps.

    Args:
        uid: The output's.
        stream: Its request's.
        buffer: The output in that stream.
        meter: Notes its tokens.
        live: Is told of its first and its last step.
        engine: Knows how many wait.
    """

    __slots__ = ("_buffer", "_engine", "_is_silent", "_live", "_meter", "_stream", "_uid")

    def __init__(
        self,
        uid: int,
        stream: RequestStream,
        buffer: OutputBuffer,
        meter: OutputMeter,
        live: LiveRequests,
        engine: EngineSupervisor,
    ) -> None:
        self._uid = uid
        self._stream = stream
        self._buffer = buffer
        self._meter = meter
        self._live = live
        self._engine = engine
        self._is_silent = True

    def __call__(self, output: RequestOutput) -> None:
        """Take what a step gave."""
        if self._is_silent:
            self._is_silent = False
            self._live.heard(self._uid, self._engine.num_waiting)
        self._meter.note(len(output.token_ids), output.began_ns, output.num_cached_tokens)
        if output.finish is not None:
            self._live.close_outputs((self._uid,))
        self._stream.receive(self._buffer, output)
