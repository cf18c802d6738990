"""Finds runners among the installed distributions, by the entry-point group ``runnerd.runners``.

Listing reads metadata only; a runner's module is imported when it is loaded by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from runnerd_spi.errors import (
    InvalidOption,
    RunnerConflict,
    RunnerNotFound,
    RunnerUnavailable,
    SpiVersionMismatch,
)
from runnerd_spi.runner import SPI_VERSION, OptionValue, RunnerOption, RunnerPlugin

GROUP = "runnerd.runners"


@dataclass(frozen=True, slots=True)
class RunnerListing:
    """One installed runner, known from metadata alone."""

    name: str
    target: str
    """``module:attribute`` of its :class:`RunnerPlugin`."""
    distribution: str
    version: str


def list_runners() -> tuple[RunnerListing, ...]:
    """Give the installed runners sorted by name; imports none of them. A conflict shows as two entries of one name."""
    found = {_listing(point) for point in entry_points(group=GROUP)}
    return tuple(sorted(found, key=lambda listing: (listing.name, listing.target, listing.distribution)))


def load_runner(name: str) -> RunnerPlugin:
    """Import the runner called ``name``.

    Raises:
        RunnerNotFound: No such runner; the message names the installed ones.
        RunnerConflict: Two distributions offer different targets under the name.
        RunnerUnavailable: Its module cannot be imported, or does not name a RunnerPlugin.
        SpiVersionMismatch: It was built for another major version.
    """
    listings = [listing for listing in list_runners() if listing.name == name]
    if not listings:
        installed = ", ".join(sorted({listing.name for listing in list_runners()})) or "none"
        raise RunnerNotFound(f"no runner called {name!r} is installed; installed: {installed}")
    if len({listing.target for listing in listings}) > 1:
        offers = " and ".join(f"{one.distribution} {one.version} ({one.target})" for one in listings)
        raise RunnerConflict(f"runner {name!r} is offered by {offers}; uninstall one of them")
    point = EntryPoint(name=name, value=listings[0].target, group=GROUP)
    try:
        plugin = point.load()
    except Exception as error:  # a foreign module may raise anything
        raise RunnerUnavailable(
            f"runner {name!r} cannot be used: {str(error) or type(error).__name__}; "
            f"reinstall or repair {listings[0].distribution}"
        ) from error
    if not isinstance(plugin, RunnerPlugin):
        raise RunnerUnavailable(
            f"runner {name!r} cannot be used: {listings[0].target} is a {type(plugin).__name__}, "
            "expected a runnerd_spi.RunnerPlugin"
        )
    if plugin.spi_version[0] != SPI_VERSION[0]:
        raise SpiVersionMismatch(
            f"runner {name!r} was built for SPI {_dotted(plugin.spi_version)}, this runnerd has SPI "
            f"{_dotted(SPI_VERSION)}; install a release of {listings[0].distribution} for SPI {SPI_VERSION[0]}"
        )
    return plugin


def parse_options(plugin: RunnerPlugin, given: Mapping[str, str]) -> dict[str, OptionValue]:
    """Convert ``name=value`` texts to the declared types and fill in defaults.

    Raises:
        InvalidOption: A name the runner does not declare, or a value that its type does not take.
    """
    declared = {option.name: option for option in plugin.options}
    for name in given:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise InvalidOption(f"runner {plugin.name!r} has no option {name!r}; it has: {known}")
    values = {option.name: option.default for option in plugin.options if option.default is not None}
    return values | {name: _convert(plugin.name, declared[name], text) for name, text in given.items()}


def _convert(runner: str, option: RunnerOption, text: str) -> OptionValue:
    if option.type is bool:
        lowered = text.strip().lower()
        if lowered in ("true", "1", "yes", "on"):
            return True
        if lowered in ("false", "0", "no", "off"):
            return False
        raise InvalidOption(f"runner {runner!r}: option {option.name} takes true or false, got {text!r}")
    try:
        return option.type(text)
    except ValueError as error:
        raise InvalidOption(
            f"runner {runner!r}: option {option.name} takes a value of type {option.type.__name__}, got {text!r}"
        ) from error


def _listing(point: EntryPoint) -> RunnerListing:
    distribution = point.dist
    if distribution is None:
        return RunnerListing(point.name, point.value, "unknown", "")
    # A damaged distribution may lack either.
    return RunnerListing(point.name, point.value, distribution.name or "unknown", distribution.version or "")


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
