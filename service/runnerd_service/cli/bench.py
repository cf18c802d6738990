"""``runnerd bench``: the field's serving benchmark over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runnerd_bench import plot
from runnerd_bench.arrivals import arrival_times
from runnerd_bench.dataset import BenchRequest, DatasetError
from runnerd_bench.driver import Driver, Run
from runnerd_bench.metrics import summarise
from runnerd_bench.report import busy_warning, comparison, table
from runnerd_client import Client, GenerateOptions
from runnerd_service.cli import bench_flags, exit_codes
from runnerd_service.cli.connection import connected, connected_async
from runnerd_service.errors import ConfigurationError

_SHOWN_ERRORS = 5
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times")


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "bench",
        help="measure a running server under load",
        description="Send requests to a running server, measure latencies and throughput, print a table.",
        epilog=f"{bench_flags.EPILOG}\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    bench_flags.add(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or compare two results; give the exit code.

    Raises:
        ConfigurationError: The requests cannot be made, or a file cannot be written.
        CallFailed: The server cannot be reached.
    """
    try:
        if arguments.compare is not None:
            bench_flags.check_compare(arguments)
            print(comparison(*map(_read_result, arguments.compare)))
            return exit_codes.OK
        bench_flags.check(arguments)
        with connected(arguments) as client:
            model, setup = client.model_info(), _setup(arguments, client)
        requests = bench_flags.requests(arguments, model.vocab_size, has_chat_template=model.has_chat_template)
        measured = asyncio.run(_measure(arguments, requests))
    except (DatasetError, plot.PlotUnavailable) as error:
        raise ConfigurationError(str(error)) from error
    if measured is None:
        print("runnerd: interrupted in the warm-up; nothing was measured", file=sys.stderr)
        return exit_codes.INTERRUPTED
    return _report(arguments, measured, setup)


async def _measure(arguments: argparse.Namespace, requests: Sequence[BenchRequest]) -> Run | None:
    """Warm up and measure until it is done or Ctrl-C; None: interrupted before anything was measured."""
    # Warm-ups share no cached prefix with what is measured, and runs share none with earlier ones.
    salt = secrets.token_hex(8) if arguments.cache_salt is None else arguments.cache_salt
    options = GenerateOptions(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        ignore_eos=arguments.ignore_eos,
    )
    async with connected_async(arguments) as client:
        with _stop_at_interrupt() as stop:
            warmups = [_shortened(requests[index % len(requests)]) for index in range(arguments.num_warmups)]
            warming = Driver(client, {**options, "cache_salt": f"{salt}-warm-up"})
            if warmups:
                title = f"warm-up, up to {bench_flags.WARMUP_TOKENS} output tokens each"
                if (await _drive(arguments, warming, warmups, title, stop)).interrupted:
                    return None
            driver = Driver(
                client,
                {**options, "cache_salt": salt},
                arguments.seed,
                arguments.max_concurrency,
                keep_texts=arguments.save_detailed,
            )
            return await _drive(arguments, driver, requests, "requests", stop, arguments.request_rate)


def _shortened(request: BenchRequest) -> BenchRequest:
    """Give a warm-up: the first tokens show whether all works, the others take their time."""
    return replace(request, output_len=min(request.output_len, bench_flags.WARMUP_TOKENS))


@contextmanager
def _stop_at_interrupt() -> Iterator[asyncio.Event]:
    """Give what Ctrl-C sets, the first time; the second one ends the command."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _drive(
    arguments: argparse.Namespace,
    driver: Driver,
    requests: Sequence[BenchRequest],
    title: str,
    stop: asyncio.Event,
    request_rate: float = math.inf,
) -> Run:
    due = arrival_times(len(requests), request_rate, arguments.burstiness, arguments.seed)
    shows_bar = sys.stderr.isatty() and not arguments.disable_tqdm
    if not shows_bar:
        print(f"runnerd: sending {len(requests)} ({title})", file=sys.stderr, flush=True)
    with tqdm(total=len(requests), desc=title, disable=not shows_bar) as bar:
        return await driver.run(requests, due, lambda _: bar.update(), stop)


def _setup(arguments: argparse.Namespace, client: Client) -> dict[str, object]:
    """Give the part of the result that says what was measured."""
    model, server = client.model_info(), client.server_info()
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "runnerd",
        "endpoint_type": "runnerd.v1.InferenceService/StreamGenerate",
        "model_id": model.name,
        "tokenizer_id": model.name,
        "server": {
            "version": server.version,
            "runner": server.runner,
            "device": server.device,
            "dtype": model.dtype,
            "async_effective": server.async_effective,
            "max_in_flight": server.max_in_flight,
            "max_num_seqs": server.max_num_seqs,
            "max_num_batched_tokens": server.max_num_batched_tokens,
        },
        "dataset_name": arguments.dataset_name,
        "num_prompts": arguments.num_prompts,
        "num_warmups": arguments.num_warmups,
        "request_rate": "inf" if math.isinf(arguments.request_rate) else arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "temperature": arguments.temperature,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "goodput": arguments.goodput or None,
        **arguments.metadata,
    }


def _report(arguments: argparse.Namespace, measured: Run, setup: dict[str, object]) -> int:
    figures = summarise(measured, arguments.metric_percentiles, arguments.goodput)
    result: dict[str, object] = {**setup, **figures}
    if measured.interrupted:
        result["interrupted"] = True
        count = len(measured.records)
        print(
            f"runnerd: interrupted after {count} of {arguments.num_prompts} requests; the figures are of these alone",
            file=sys.stderr,
        )
    print(table(result, arguments.metric_percentiles, arguments.percentile_metrics))
    if warning := busy_warning(result):
        print(f"runnerd: {warning}", file=sys.stderr)
    try:
        if arguments.save_result or arguments.save_detailed:
            print(f"written to {_save(arguments, result, measured)}")
        if arguments.plot is not None:
            plot.draw(measured.records, result, arguments.plot)
            print(f"drawn to {arguments.plot}")
    except OSError as error:
        raise ConfigurationError(f"cannot write {error.filename}: {error.strerror}") from error
    errors = Counter(one.error for one in measured.records if one.error)
    for text, count in errors.most_common(_SHOWN_ERRORS):
        print(f"runnerd: {count} failed: {text}", file=sys.stderr)
    if measured.interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.FAILURE if errors else exit_codes.OK


def _save(arguments: argparse.Namespace, result: dict[str, object], measured: Run) -> Path:
    if arguments.save_detailed:
        records = measured.records
        columns = (
            [one.prompt_tokens for one in records],
            [one.output_tokens for one in records],
            [one.ttft if one.completed else 0.0 for one in records],
            [one.itls for one in records],
            [one.text for one in records],
            [one.error for one in records],
            [one.start for one in records],
        )
        result = {**result, **dict(zip(_DETAILS, columns, strict=True))}
    concurrency = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
    model = str(result["model_id"]).rsplit("/", 1)[-1]
    name = f"runnerd-{arguments.request_rate:g}qps{concurrency}-{model}-{result['date']}.json"
    path = Path(arguments.result_dir, arguments.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    return path


def _read_result(path: Path) -> dict[str, object]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(result, dict) or "duration" not in result:
        raise ConfigurationError(f"{path} is no result of a benchmark")
    return result
