"""Describes the installed runners: what each can do, and why one cannot be used here. Starts none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runnerd_service.frontend.validation import capability_map
from runnerd_spi import RunnerError, RunnerListing, RunnerPlugin, list_runners, load_runner


@dataclass(frozen=True, slots=True)
class OptionDescription:
    """An option of a runner's own."""

    name: str
    type: str
    default: str
    """As text; empty for none."""
    help: str


@dataclass(frozen=True, slots=True)
class RunnerDescription:
    """An installed runner. Of one whose module cannot be imported only name, origin and reason are known."""

    name: str
    distribution: str
    version: str
    unavailable_reason: str = ""
    """Empty when it can be used here."""
    description: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    """By name; "device", "host_sync" or "no"."""
    options: tuple[OptionDescription, ...] = ()
    max_in_flight: int = 0


def describe_runners() -> tuple[RunnerDescription, ...]:
    """Give every installed runner, by name. Imports their plug-in modules, so it may take a moment."""
    return tuple(_describe(listing) for listing in list_runners())


def _describe(listing: RunnerListing) -> RunnerDescription:
    try:
        plugin = load_runner(listing.name)
    except Exception as error:  # noqa: BLE001 - a broken plug-in must not hide the others
        return RunnerDescription(listing.name, listing.distribution, listing.version, _reason(error))
    return RunnerDescription(
        name=listing.name,
        distribution=listing.distribution,
        version=listing.version,
        unavailable_reason=_unavailable_reason(plugin),
        description=plugin.description,
        capabilities=capability_map(plugin.capabilities),
        options=tuple(
            OptionDescription(
                option.name,
                option.type.__name__,
                "" if option.default is None else str(option.default),
                option.help,
            )
            for option in plugin.options
        ),
        max_in_flight=plugin.capabilities.max_in_flight,
    )


def _unavailable_reason(plugin: RunnerPlugin) -> str:
    try:
        plugin.check()
    except Exception as error:  # noqa: BLE001 - as above
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
