"""Runners are found by metadata and loaded by name; whatever is wrong with one is said in words an operator can use."""

import subprocess
import sys
from pathlib import Path

import pytest

from runnerd_spi import (
    RunnerConflict,
    RunnerError,
    RunnerListing,
    RunnerNotFound,
    RunnerUnavailable,
    SpiVersionMismatch,
    list_runners,
    load_runner,
)

PLUGIN = """
from runnerd_spi import RunnerCapabilities, RunnerConfig, RunnerPlugin

def create(config: RunnerConfig):
    raise NotImplementedError

HERE = RunnerPlugin("{name}", "for a test", RunnerCapabilities(1, ("float32",), (16,)), create, spi_version={version})
"""


def install(site: Path, distribution: str, module: str, source: str, runner: str, version: str = "1.2") -> None:
    """Lay a distribution that offers one runner into a folder, as an installer would."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[runnerd.runners]\n{runner} = {module}:HERE\n")
    (site / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_runner_is_listed_and_loaded_by_name(site: Path) -> None:
    install(site, "acme-runner", "acme_good", PLUGIN.format(name="acme", version=(1, 0)), "acme")
    assert RunnerListing("acme", "acme_good:HERE", "acme-runner", "1.2") in list_runners()
    assert load_runner("acme").name == "acme"


def test_listing_imports_no_runner(site: Path) -> None:
    install(site, "acme-runner", "acme_explodes", "raise SystemExit(3)", "acme")
    assert "acme" in {listing.name for listing in list_runners()}
    assert "acme_explodes" not in sys.modules


def test_the_simulated_runner_is_installed_and_sorted_among_the_others() -> None:
    names = [listing.name for listing in list_runners()]
    assert "sim" in names
    assert names == sorted(names)


def test_an_unknown_name_names_the_installed_runners() -> None:
    with pytest.raises(RunnerNotFound, match=r"no runner called 'simm' is installed; installed: .*\bsim\b"):
        load_runner("simm")


def test_two_distributions_with_one_name_and_different_targets_are_a_conflict(site: Path) -> None:
    install(site, "acme-runner", "acme_one", PLUGIN.format(name="acme", version=(1, 0)), "acme")
    install(site, "other-runner", "acme_two", PLUGIN.format(name="acme", version=(1, 0)), "acme", version="3")
    with pytest.raises(RunnerConflict, match=r"acme-runner 1\.2 \(acme_one:HERE\) and other-runner 3 .*uninstall one"):
        load_runner("acme")
    assert [listing.name for listing in list_runners()].count("acme") == 2


def test_two_distributions_with_one_target_are_no_conflict(site: Path) -> None:
    source = PLUGIN.format(name="acme", version=(1, 0))
    install(site, "acme-runner", "acme_same", source, "acme")
    install(site, "acme-runner-renamed", "acme_same", source, "acme")
    assert load_runner("acme").name == "acme"


def test_a_missing_dependency_is_named_with_the_distribution_to_repair(site: Path) -> None:
    install(site, "acme-runner", "acme_needs", "import no_such_driver", "acme")
    with pytest.raises(RunnerUnavailable, match=r"'acme' cannot be used: No module named 'no_such_driver'; .*acme"):
        load_runner("acme")


def test_a_target_that_does_not_exist_makes_the_runner_unavailable(site: Path) -> None:
    install(site, "acme-runner", "acme_empty", "", "acme")
    with pytest.raises(RunnerUnavailable, match="HERE"):
        load_runner("acme")


def test_a_module_that_raises_something_else_makes_the_runner_unavailable(site: Path) -> None:
    install(site, "acme-runner", "acme_breaks", "raise OSError('libacme.so: cannot open')", "acme")
    with pytest.raises(RunnerUnavailable, match=r"libacme\.so: cannot open") as caught:
        load_runner("acme")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_target_of_another_type_makes_the_runner_unavailable(site: Path) -> None:
    install(site, "acme-runner", "acme_type", "HERE = 7", "acme")
    with pytest.raises(RunnerUnavailable, match=r"acme_type:HERE is a int, expected a runnerd_spi\.RunnerPlugin"):
        load_runner("acme")


def test_another_major_version_is_refused_with_both_numbers(site: Path) -> None:
    install(site, "acme-runner", "acme_future", PLUGIN.format(name="acme", version=(2, 3)), "acme")
    with pytest.raises(SpiVersionMismatch, match=r"built for SPI 2\.3, this runnerd has SPI 1\.\d+"):
        load_runner("acme")


def test_another_minor_version_is_accepted(site: Path) -> None:
    install(site, "acme-runner", "acme_minor", PLUGIN.format(name="acme", version=(1, 99)), "acme")
    assert load_runner("acme").spi_version == (1, 99)


def test_every_discovery_error_is_a_runner_error() -> None:
    for error in (RunnerNotFound, RunnerConflict, RunnerUnavailable, SpiVersionMismatch):
        assert issubclass(error, RunnerError)


def test_loading_the_simulated_plugin_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from runnerd_spi import load_runner; load_runner('sim'); "
        "print(sorted({'torch', 'numpy', 'grpc', 'runnerd_sim.runner'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
