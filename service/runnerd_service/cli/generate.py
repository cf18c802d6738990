"""``runnerd generate``: streams an answer from a running server to the terminal."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from runnerd_client import (
    ChatPrompt,
    ChatTurn,
    Client,
    GenerateOptions,
    GenerationStream,
    GuidedDecoding,
    OutputChunk,
    RequestCancelledError,
    RunnerdError,
    Token,
    chat,
    guides,
    to_dict,
)
from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import add_connection, connected
from runnerd_service.cli.stats import StreamStats
from runnerd_service.errors import ConfigurationError

_EPILOG = f"""\
examples:
  runnerd generate "Why is the sky blue?"
  runnerd generate --raw "The capital of France is" --max-tokens 8 --temperature 0 --stats
  git diff | runnerd generate --system "Write a commit message." -
  runnerd generate --json --n 2 --seed 7 "Tell me a joke" | jq .output.text

{exit_codes.HELP}
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "generate",
        help="stream an answer from a running server",
        description="Stream an answer from a running server. Options left out take the server's defaults.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="the prompt; - reads stdin (default)")
    add_connection(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="render the model's chat template (default where it has one)")
    form.add_argument("--raw", action="store_true", help="take the prompt as it is")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    for name, parse, text in _OPTIONS:
        parser.add_argument(f"--{name}", type=parse, metavar="N" if parse is not float else "X", help=text)
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end of text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    guide = parser.add_mutually_exclusive_group()
    guide.add_argument(
        "--json-schema", metavar="FILE", help="answer JSON of this schema (server: --async-execution off)"
    )
    guide.add_argument(
        "--regex", metavar="PATTERN", help="answer what this whole expression matches (server: the same)"
    )
    guide.add_argument(
        "--choice", action="append", metavar="TEXT", help="answer one of these; repeat (server: the same)"
    )
    parser.add_argument("--request-id", metavar="NAME", help="name of the request")
    parser.add_argument("--json", action="store_true", help="print each message of the stream as a line of JSON")
    parser.add_argument("--stats", action="store_true", help="print TTFT and rates to stderr at the end")
    parser.set_defaults(run=run)


_OPTIONS = (
    ("max-tokens", int, "most output tokens"),
    ("temperature", float, "0 is greedy"),
    ("top-p", float, "keep the smallest set of likely tokens that reaches this probability"),
    ("top-k", int, "keep this many likely tokens"),
    ("seed", int, "same seed, same answer"),
    ("n", int, "number of outputs"),
    ("logprobs", int, "print each token with its log-probability and this many alternatives"),
)


def run(arguments: argparse.Namespace) -> int:
    """Generate; give the exit code."""
    with connected(arguments) as client:
        prompt = _prompt(arguments, client)
        options = GenerateOptions(
            request_id=arguments.request_id,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.seed,
            stop=arguments.stop,
            n=arguments.n,
            logprobs=arguments.logprobs,
            ignore_eos=arguments.ignore_eos,
            guided_decoding=_guide(arguments),
        )
        stats = StreamStats.begin()
        try:
            stream = client.stream(prompt, **options)
        except ValueError as error:  # such as a negative count
            raise ConfigurationError(str(error)) from error
        with stream, _cancelled_by_interrupt(stream):
            _print_stream(stream, arguments, stats)
    if arguments.stats:
        print(stats.summary(), file=sys.stderr)
    return exit_codes.OK


def _guide(arguments: argparse.Namespace) -> GuidedDecoding | None:
    if arguments.json_schema is not None:
        try:
            return guides.json_schema(Path(arguments.json_schema).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--json-schema {arguments.json_schema} cannot be read: {error}") from error
    if arguments.regex is not None:
        return guides.regex(arguments.regex)
    return None if arguments.choice is None else guides.choice(*arguments.choice)


@contextmanager
def _cancelled_by_interrupt(stream: GenerationStream) -> Iterator[None]:
    """While inside, Ctrl-C cancels the call; a KeyboardInterrupt in the middle of gRPC's own code could be lost."""
    interrupted = threading.Event()

    def cancel(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()
        # Not here: the thread that is interrupted may hold the lock that a cancel takes.
        threading.Thread(target=stream.cancel).start()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except RequestCancelledError:
        if interrupted.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _prompt(arguments: argparse.Namespace, client: Client) -> str | ChatPrompt:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw:
        if arguments.system is not None:
            raise ConfigurationError("--system is a part of a conversation; leave out --raw")
        return str(text)
    if not arguments.chat and arguments.system is None and not client.model_info().has_chat_template:
        return str(text)
    system: list[ChatTurn] = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return chat(*system, {"role": "user", "content": text})


def _print_stream(stream: GenerationStream, arguments: argparse.Namespace, stats: StreamStats) -> None:
    printer = _Printer(with_headers=(arguments.n or 1) > 1)
    try:
        for message in stream:
            stats.add(message)
            if arguments.json:
                print(json.dumps(to_dict(message), ensure_ascii=False), flush=True)
            elif message.HasField("output"):
                printer.add(message.output, with_records=arguments.logprobs is not None)
    except RunnerdError:
        printer.cut()
        raise


class _Printer:
    """Prints a single output as it grows; several ones whole, each when it has ended, so that they do not mix."""

    def __init__(self, with_headers: bool) -> None:
        self._with_headers = with_headers
        self._held: dict[int, list[str]] = {}
        self._in_line = False

    def add(self, chunk: OutputChunk, *, with_records: bool) -> None:
        text = "".join(map(_record, chunk.tokens)) if with_records else chunk.text
        ending = "" if with_records else "\n"
        if not self._with_headers:
            print(text, end=ending if chunk.HasField("finish") else "", flush=True)
            if text or chunk.HasField("finish"):
                self._in_line = not (chunk.HasField("finish") or text.endswith("\n"))
            return
        held = self._held.setdefault(chunk.index, [])
        held.append(text)
        if chunk.HasField("finish"):
            print(f"--- output {chunk.index} ---\n{''.join(held)}", end=ending, flush=True)
            del self._held[chunk.index]

    def cut(self) -> None:
        """Show what came before the stream broke, so that an error message begins a line of its own."""
        for index, held in sorted(self._held.items()):
            print(f"--- output {index} (incomplete) ---\n{''.join(held)}", flush=True)
        if self._in_line:
            print(flush=True)


def _record(token: Token) -> str:
    others = "".join(f"\t{one.text!r} {one.logprob:.4f}" for one in token.candidates)
    return f"{token.text!r}\t{token.logprob:.4f}\trank {token.rank}{others}\n"
