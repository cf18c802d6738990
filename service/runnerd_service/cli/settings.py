"""The settings of ``runnerd serve``, read from flags, environment and a TOML file, in that precedence.

Every value is text until its setting's ``parse`` has checked it, wherever it came from; an error names the source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from runnerd_service.cli.setting_table import ENVIRONMENT_PREFIX, SETTINGS, Owner, Setting, variable_of
from runnerd_service.config import EngineConfig, SecurityConfig, ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.telemetry.logs import LogFormat

RUNNER_OPTION = "runner-option"

_NOT_OF_SERVE = frozenset(f"{ENVIRONMENT_PREFIX}{name}" for name in ("ADDRESS", "TOKEN"))
"""Variables of the other subcommands."""
_OF_KUBERNETES = re.compile(rf"{ENVIRONMENT_PREFIX}(SERVICE_(HOST|PORT)|PORT_\d+_).*")
_DEFAULTS: Mapping[Owner, Mapping[str, object]] = {
    "engine": asdict(EngineConfig()),
    "server": asdict(ServerConfig()),
    "security": asdict(SecurityConfig()),
    "tenant": asdict(TenantConfig()),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``runnerd serve`` was asked for."""

    config: ServerConfig
    log_level: str = "info"
    log_format: LogFormat = "text"


@dataclass(slots=True)
class _Source:
    """Texts by setting name, and how an error calls each."""

    texts: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    runner_options: dict[str, str] = field(default_factory=dict)


def load_settings(
    flags: Mapping[str, str], runner_options: Mapping[str, str], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Merge the sources: flags before environment before file before defaults.

    Args:
        flags: Texts by setting name, of those that were given.
        runner_options: ``--runner-option`` by name.
        environment: The process's environment.
        file: TOML file of settings; None for none.

    Raises:
        ConfigurationError: A name that is no setting, or a value that its setting does not take.
    """
    from_file = _Source() if file is None else _read_file(file)
    from_environment = _read_environment(environment)
    merged = _Source(from_file.texts | from_environment.texts, from_file.labels | from_environment.labels)
    merged.texts |= flags
    merged.labels |= {name: f"--{name}" for name in flags}
    options = from_file.runner_options | from_environment.runner_options | dict(runner_options)
    values: dict[str, dict[str, Any]] = {owner: {} for owner in get_args(Owner)}
    values["engine"]["runner_options"] = options
    for setting in SETTINGS:
        if setting.name in merged.texts:
            value = _parse(setting, merged.texts[setting.name], merged.labels[setting.name])
            values[setting.owner][setting.attribute] = value
    return Settings(
        config=ServerConfig(
            engine=EngineConfig(**values["engine"]),
            security=SecurityConfig(**values["security"]),
            tenant=TenantConfig(**values["tenant"]),
            **values["server"],
        ),
        **values["process"],
    )


def default_text(setting: Setting) -> str:
    """Give the default as ``--help`` shows it; empty when there is none to show."""
    if setting.owner == "process":
        return ""
    value = _DEFAULTS[setting.owner][setting.attribute]
    return "" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)


def split_options(assignments: Iterable[str], label: str) -> dict[str, str]:
    """Split each ``name=value``.

    Raises:
        ConfigurationError: There is no ``=``, or no name before it, or a name comes twice.
    """
    options: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"{label}: expected name=value, got {assignment!r}")
        if name in options:
            raise ConfigurationError(f"{label}: {name} is given twice, as {options[name]!r} and {value!r}; keep one")
        options[name] = value
    return options


def _read_file(path: Path) -> _Source:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration file {path} is not TOML: {error}") from error
    source, names = _Source(), {setting.name for setting in SETTINGS}
    for key, value in content.items():
        name, label = key.replace("_", "-"), f"{path}: {key}"
        if name == RUNNER_OPTION:
            if not isinstance(value, dict):
                raise ConfigurationError(f"{label}: expected a table of options, got {value!r}")
            source.runner_options = {option: _toml_text(f"{label}.{option}", one) for option, one in value.items()}
        elif name in source.texts:
            raise ConfigurationError(f"{label} is given twice; keep one spelling of {name}")
        elif name in names:
            source.texts[name], source.labels[name] = _toml_text(label, value), label
        else:
            close = difflib.get_close_matches(name, sorted(names | {RUNNER_OPTION}), n=1)
            hint = f"did you mean {close[0]}?" if close else "`runnerd serve --help` lists them"
            raise ConfigurationError(f"{label} is not a setting; {hint}")
    return source


def _check_variables(environment: Mapping[str, str]) -> None:
    settings = {setting.variable for setting in SETTINGS} | {variable_of(RUNNER_OPTION)}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in settings | _NOT_OF_SERVE:
            continue
        if _OF_KUBERNETES.fullmatch(name):
            hint = "Kubernetes sets it for a service called runnerd: set enableServiceLinks to false in the pod"
        else:
            # without what they all begin with, which makes them alike
            names = {one.removeprefix(ENVIRONMENT_PREFIX): one for one in sorted(settings)}
            close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), names, n=1)
            hint = f"did you mean {names[close[0]]}?" if close else "`runnerd serve --help` lists them; unset it"
        raise ConfigurationError(f"the environment variable {name} is not a setting; {hint}")


def _read_environment(environment: Mapping[str, str]) -> _Source:
    _check_variables(environment)
    source = _Source()
    for setting in SETTINGS:
        if setting.variable in environment:
            source.texts[setting.name] = environment[setting.variable]
            source.labels[setting.name] = setting.variable
    variable = variable_of(RUNNER_OPTION)
    assignments = filter(None, environment.get(variable, "").split(","))
    source.runner_options = split_options(assignments, variable)
    return source


def _toml_text(label: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigurationError(f"{label}: expected a text, number or boolean, got {value!r}")


def _parse(setting: Setting, given: str, label: str) -> object:
    try:
        return setting.parse(given)
    except ValueError as error:
        hint = ""
        if label == variable_of("port") and given.startswith("tcp://"):
            hint = "; Kubernetes sets this for a service called runnerd: set enableServiceLinks to false in the pod"
        raise ConfigurationError(f"{label}: expected {error}, got {given!r}{hint}") from error
