"""``runnerd runners`` and ``runnerd info``: what is installed here, and what a running server does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runnerd.v1 import server_pb2
from runnerd_client import UnavailableError, to_dict
from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import add_connection, connected
from runnerd_service.rpc.runners import RunnerDescription, describe_runners


def add_parsers(commands: Any) -> None:
    """Add the subcommands to argparse's ``commands``."""
    runners = commands.add_parser(
        "runners",
        help="list the installed runners",
        description="List the installed runners: what each serves, its options, and why one cannot be used here.",
        epilog=f"examples:\n  runnerd runners\n  runnerd runners --json | jq '.[].name'\n\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    runners.add_argument("--json", action="store_true", help="print JSON")
    runners.set_defaults(run=run_runners)
    info = commands.add_parser(
        "info",
        help="describe a running server",
        description="Describe a running server: its model, its configuration, its load.",
        epilog=f"examples:\n  runnerd info\n  runnerd info --json | jq .load.num_running\n\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_connection(info)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=run_info)


def run_runners(arguments: argparse.Namespace) -> int:
    """Print the installed runners; give the exit code."""
    described = describe_runners()
    if arguments.json:
        print(json.dumps([asdict(runner) for runner in described], indent=2))
    else:
        print("\n\n".join(map(_runner_text, described)) or "no runner is installed")
    return exit_codes.OK


def run_info(arguments: argparse.Namespace) -> int:
    """Print what the server says of itself; give the exit code."""
    with connected(arguments) as client:
        server, load = client.server_info(), client.load()
        try:
            model = client.model_info()
        except UnavailableError:  # it loads, or failed: the server's state says so
            model = None
    if arguments.json:
        parts = {"model": None if model is None else to_dict(model), "server": to_dict(server), "load": to_dict(load)}
        print(json.dumps(parts, indent=2, ensure_ascii=False))
    else:
        print("\n\n".join((_model_text(model), _server_text(server), _load_text(load))))
    return exit_codes.OK


def _model_text(model: server_pb2.GetModelInfoResponse | None) -> str:
    if model is None:
        return "model\n  not loaded"
    sizes = {
        "parameters": f"{model.num_parameters:,}" if model.num_parameters else "",
        "weights": f"{model.weights_bytes / 2**20:,.0f} MiB" if model.weights_bytes else "",
    }
    limits = {
        "max_model_len": f"{model.max_model_len} tokens, prompt and output",
        "max_n": model.max_n,
        "max_logprobs": model.max_logprobs,
        "vocab_size": model.vocab_size,
        "eos_token_ids": ", ".join(map(str, model.eos_token_ids)),
        "chat template": _yes_or_no(model.has_chat_template),
    }
    served = {
        label: ", ".join(sorted(name for name, value in model.capabilities.items() if value == support))
        for support, label in (
            (server_pb2.SUPPORT_DEVICE, "serves"),
            (server_pb2.SUPPORT_HOST_SYNC, "with a host wait"),
            (server_pb2.SUPPORT_NO, "does not serve"),
        )
    }
    told = {"name": model.name, "architecture": model.architecture, "dtype": model.dtype}
    return _section("model", told | sizes | limits | served)


def _server_text(server: server_pb2.GetServerInfoResponse) -> str:
    overlap = f"{server.max_in_flight} steps in flight" if server.async_effective else "synchronous"
    return _section(
        "server",
        {
            "state": server_pb2.ServerState.Name(server.state).removeprefix("SERVER_STATE_").lower(),
            "last_error": server.last_error,
            "uptime": f"{server.uptime.ToTimedelta().total_seconds():.0f} s",
            "engine restarts": server.num_engine_restarts,
            "engine_pid": server.engine_pid or "",
            "version": f"{server.version} (runner SPI {server.spi_version})",
            "runner": server.runner,
            "device": server.device,
            "async_execution": f"{server.async_execution}: {overlap}"
            if server.max_in_flight
            else server.async_execution,
            "max_num_seqs": server.max_num_seqs,
            "max_num_batched_tokens": server.max_num_batched_tokens,
            "KV blocks": f"{server.num_blocks} of {server.block_size} tokens" if server.num_blocks else "",
            "max_message_bytes": f"{server.max_message_bytes:,}",
        },
    )


def _load_text(load: server_pb2.GetLoadResponse) -> str:
    return _section(
        "load",
        {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "KV blocks in use": f"{load.num_used_blocks} ({load.kv_cache_usage:.1%})",
            "prompt tokens": load.prompt_tokens,
            "generated tokens": load.generation_tokens,
            "found in the prefix cache": f"{load.prefix_cache_hits} of {load.prefix_cache_queries} prompt tokens",
            "steps": load.num_steps,
            "preemptions": load.num_preemptions,
        },
    )


def _section(title: str, values: Mapping[str, object]) -> str:
    """Lay out a part; what is empty is left out."""
    return "\n".join([title, *(f"  {name:27}{value}" for name, value in values.items() if value != "")])


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _runner_text(runner: RunnerDescription) -> str:
    lines = [f"{runner.name}: {runner.description or 'not usable'} ({runner.distribution} {runner.version})"]
    if runner.unavailable_reason:
        lines.append(f"  cannot be used here: {runner.unavailable_reason}")
    for support, label in (("device", "serves"), ("host_sync", "serves with a host wait"), ("no", "does not serve")):
        names = [name for name, value in runner.capabilities.items() if value == support]
        if names:
            lines.append(f"  {label}: {', '.join(names)}")
    if runner.max_in_flight:
        lines.append(f"  most steps in flight: {runner.max_in_flight}")
    lines += [f"  --runner-option {one.name}={one.default or one.type.upper()}  {one.help}" for one in runner.options]
    return "\n".join(lines)
