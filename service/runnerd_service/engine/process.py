"""The engine process: ``python -m runnerd_service.engine.process``, started by :class:`EngineClient` and nobody else.

It reads its configuration from standard input, brings the engine up and serves it on a ZeroMQ socket. It ends on
Shutdown, on SIGTERM, when the engine is dead, and when the front process is gone, which it sees at the end of its
standard input. It knows no text and no gRPC.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from types import FrameType

import msgspec
import zmq

from runnerd_service.engine.engine import Engine, EngineDead
from runnerd_service.engine.kv_cache import IntegrityError
from runnerd_service.engine.launch import Launch
from runnerd_service.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    EngineError,
    FromEngine,
    LoadProgress,
    Reply,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from runnerd_service.engine.setup import StartedEngine, resolve, start_engine
from runnerd_service.errors import ConfigurationError
from runnerd_service.guided.guide import Vocabulary
from runnerd_spi import RunnerError, load_runner

logger = logging.getLogger(__name__)

EXIT_START_FAILED = 1
EXIT_ENGINE_DEAD = 3
EXIT_ORPHANED = 4

_LINGER_MILLISECONDS = 2000
_PR_SET_PDEATHSIG = 1


class Channel:
    """The engine's end of the socket.

    Args:
        address: Where the front process listens.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The front limits what is under way; a full queue here would stop the device.
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._encoder.encode(message), copy=True)

    def wait(self) -> None:
        """Wait until there is a message."""
        self._socket.poll(None)

    def receive(self) -> list[ToEngine]:
        """Give all messages that are there."""
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(data))

    def close(self) -> None:
        """Send what is queued, for two seconds at most, and close."""
        self._context.destroy(linger=_LINGER_MILLISECONDS)


def serve(engine: Engine, channel: Channel) -> None:
    """Run the engine until Shutdown comes: drain the inbox, step, send one batch of outputs.

    Raises:
        EngineDead: The runner is unusable.
    """
    timeline = engine.timeline
    while True:
        if not engine.has_work:
            timeline.enter("idle")
            channel.wait()
        timeline.enter("inbox")
        for message in channel.receive():
            if isinstance(message, Shutdown):
                return
            _handle(engine, channel, message)
        if engine.has_work:
            outputs = engine.step()
            channel.send(StepOutputs(tuple(outputs), engine.load()))


def main() -> int:
    """Run the engine process; gives its exit code."""
    # Ctrl-C and the end of a terminal go to the whole group; the front decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    # What the threads were doing goes to the log, with a crash and when the front asks for it: the engine hangs.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _die_with_parent()
    launch = msgspec.json.decode(_read_line(), type=Launch)
    threading.Thread(target=_exit_when_orphaned, name="orphan-watch", daemon=True).start()
    logging.basicConfig(level=launch.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    channel = Channel(launch.address)
    try:
        started = _start(launch, channel)
        if started is None:
            return EXIT_START_FAILED
        try:
            return _run(started, channel)
        finally:
            started.runner.close()
    finally:
        channel.close()


def _start(launch: Launch, channel: Channel) -> StartedEngine | None:
    try:
        plugin = load_runner(launch.config.runner)
        resolved = resolve(launch.config, plugin)
        for warning in resolved.warnings:
            logger.warning("%s", warning)
        return start_engine(resolved, plugin, lambda *progress: channel.send(LoadProgress(*progress)))
    except (ConfigurationError, RunnerError) as error:
        channel.send(EngineError("start", type(error).__name__, _one_line(error)))
    except Exception as error:
        logger.exception("the engine cannot start")
        channel.send(EngineError("start", type(error).__name__, _one_line(error)))
    return None


def _run(started: StartedEngine, channel: Channel) -> int:
    # Nothing made so far is garbage before the end; a full collection need not look at it again.
    gc.collect()
    gc.freeze()
    channel.send(started.ready)
    try:
        serve(started.engine, channel)
    except EngineDead as error:
        logger.exception("the engine is dead")
        channel.send(EngineError("step", error.kind, _one_line(error)))
        return EXIT_ENGINE_DEAD
    except Exception as error:
        logger.exception("the engine has a defect")
        channel.send(EngineError("step", type(error).__name__, _one_line(error)))
        return EXIT_ENGINE_DEAD
    return 0


def _handle(engine: Engine, channel: Channel, message: AddRequest | AbortRequests | Vocabulary | Call) -> None:
    match message:
        case AddRequest():
            try:
                engine.add(message)
            except ValueError:
                logger.exception("request dropped")
        case Vocabulary():
            engine.use_vocabulary(message)
        case AbortRequests():
            engine.abort(message.uids)
        case Call():
            channel.send(_answer(engine, message))


def _answer(engine: Engine, call: Call) -> Reply:
    methods = {
        "reset_prefix_cache": engine.reset_prefix_cache,
        "check_integrity": engine.check_integrity,
        "start_trace": engine.start_trace,
        "stop_trace": engine.stop_trace,
        "recent_steps": engine.timeline.recent_steps,
    }
    try:
        return Reply(call.call_id, True, methods[call.method]())
    except IntegrityError as error:
        logger.exception("the engine's books do not agree")
        return Reply(call.call_id, False, _one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _read_line() -> bytes:
    # Unbuffered: a thread reads on from the same descriptor, and must hold no lock when the interpreter ends.
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 1 << 16)
        if not part:
            raise SystemExit("standard input ended before the configuration; this module is started by runnerd itself")
        line += part
    return bytes(line)


def _exit_when_orphaned() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    # Nobody is left to answer to, and the main thread may be waiting for the device.
    os._exit(EXIT_ORPHANED)


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies, for the case that no Python thread runs any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
