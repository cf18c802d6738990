"""Settings from flags, environment and file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from runnerd_service.cli.main import build_parser, main
from runnerd_service.cli.setting_table import SETTINGS
from runnerd_service.cli.settings import Settings, default_text, load_settings
from runnerd_service.cli.values import byte_size
from runnerd_service.config import EngineConfig, SecurityConfig, ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError


def load(
    flags: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    file: Path | None = None,
    runner_options: dict[str, str] | None = None,
) -> Settings:
    return load_settings(flags or {}, runner_options or {}, environment or {}, file)


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "runnerd.toml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_is_the_default_configuration() -> None:
    assert load().config == ServerConfig()


@pytest.mark.parametrize(
    ("owner", "config"),
    [("engine", EngineConfig), ("server", ServerConfig), ("security", SecurityConfig), ("tenant", TenantConfig)],
)
def test_each_field_of_the_configuration_has_a_setting(owner: str, config: type) -> None:
    ours = {setting.attribute for setting in SETTINGS if setting.owner == owner}
    assert ours == {field.name for field in fields(config)} - {"engine", "security", "tenant", "runner_options"}


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.owner != "process"], ids=lambda one: one.name)
def test_each_default_is_a_value_that_its_setting_takes(setting) -> None:
    default = default_text(setting)
    if not default:
        pytest.skip("none by default")
    assert load({setting.name: default}).config == ServerConfig()


def test_flags_come_before_environment_before_file(toml) -> None:
    path = toml("port = 1\nhost = 'file'\nmax-num-seqs = 3\nmax_waiting = 5\n")
    environment = {"RUNNERD_PORT": "2", "RUNNERD_HOST": "environment"}
    config = load({"port": "3"}, environment, path).config
    assert (config.port, config.host, config.engine.max_num_seqs, config.max_waiting) == (3, "environment", 3, 5)


def test_runner_options_merge_by_name(toml) -> None:
    path = toml("[runner-option]\na = 1\nb = true\nc = 'x'\n")
    config = load(None, {"RUNNERD_RUNNER_OPTION": "b=2,d=4"}, path, {"d": "5"}).config
    assert config.engine.runner_options == {"a": "1", "b": "2", "c": "x", "d": "5"}


def test_switches_can_be_turned_off_again(toml) -> None:
    path = toml("trust-remote-code = true\nprefix-caching = false\n")
    assert load(file=path).config.engine.trust_remote_code
    assert not load(file=path).config.engine.prefix_caching
    arguments = build_parser().parse_args(["serve", "--no-trust-remote-code", "--prefix-caching"])
    assert arguments.trust_remote_code is False
    config = load({"trust-remote-code": "False", "prefix-caching": "True"}, {}, path).config
    assert (config.engine.trust_remote_code, config.engine.prefix_caching) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot is not a setting; did you mean port?"),
        ("zebra = 1", "zebra is not a setting; `runnerd serve --help` lists them"),
        ("port = [1]", "port: expected a text, number or boolean, got [1]"),
        ("port = 'x'", "port: expected a whole number from 0 to 65535, got 'x'"),
        ("runner-option = 3", "runner-option: expected a table of options, got 3"),
        ("max-n = 1\nmax_n = 2", "max_n is given twice; keep one spelling of max-n"),
        ("[runner-option]\na = [1]", "runner-option.a: expected a text, number or boolean, got [1]"),
        ("port 3", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(toml, text: str, message: str) -> None:
    path = toml(text)
    with pytest.raises(ConfigurationError) as caught:
        load(file=path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the configuration file"):
        load(file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("port", "65536", "a whole number from 0 to 65535"),
        ("max-model-len", "1", "a whole number from 2"),
        ("memory-utilization", "1.5", "a share above 0"),
        ("memory-utilization", "nan", "a share above 0"),
        ("kv-cache-memory-bytes", "much", "a number of bytes"),
        ("kv-cache-memory-bytes", "0", "a number of bytes"),
        ("max-message-bytes", "1025MiB", "a number of bytes up to 1GiB"),
        ("max-message-bytes", "much", "a number of bytes up to 1GiB"),
        ("async-execution", "maybe", "one of auto, required, off"),
        ("drain-seconds", "-1", "seconds, 0 or from"),
        ("drain-seconds", "inf", "seconds, 0 or from"),
        ("priority-ageing", "1e300", "seconds, 0 or from 0.000001 to 1000000000"),
        ("priority-ageing", "1e-300", "seconds, 0 or from 0.000001 to 1000000000"),
        ("max-num-seqs", "5000000000", "a whole number from 1 to 65536"),
        ("max-n", "99999999999", "a whole number from 1 to 65536"),
        ("max-num-batched-tokens", "99999999999", "a whole number from 1 to 2147483647"),
        ("max-guide-bytes", "2GiB", "a number of bytes up to 1GiB"),
        ("kv-cache-memory-bytes", "99999999999GiB", "a number of bytes below 2**63"),
        ("otlp-traces-endpoint", "x", "a URL, such as http://127.0.0.1:4317"),
        ("otlp-traces-endpoint", "localhost:4317", "a URL"),
        ("otlp-traces-endpoint", "http://[::1", "a URL"),
        ("log-level", "loud", "one of debug, info, warning, error"),
        ("runner", " ", "a text that is not empty"),
    ],
)
def test_a_wrong_value_is_refused_with_its_source(name: str, given: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({name: given})
    assert f"--{name}: expected {expected}" in str(caught.value)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize(
    "setting", [one for one in SETTINGS if one.metavar in ("N", "SIZE", "SECONDS")], ids=lambda one: one.name
)
def test_no_number_is_larger_than_what_can_be_told_and_used(setting) -> None:
    with pytest.raises(ConfigurationError, match=f"--{setting.name}: expected .*, got '9{{20}}'"):
        load({setting.name: "9" * 20})


def test_the_variable_that_kubernetes_sets_is_explained() -> None:
    with pytest.raises(ConfigurationError, match="enableServiceLinks"):
        load(environment={"RUNNERD_PORT": "tcp://10.0.0.1:50051"})


def test_variables_of_other_commands_and_programs_are_let_be() -> None:
    environment = {"RUNNERD_ADDRESS": "x", "RUNNERD_TOKEN": "y", "OTHER": "z", "RUNNERD_MAX_N": "3"}
    assert load(environment=environment).config == ServerConfig(max_n=3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RUNNERD_PROT", "did you mean RUNNERD_PORT?"),
        ("RUNNERD_ZEBRA", "`runnerd serve --help` lists them"),
        ("RUNNERD_SERVICE_HOST", "set enableServiceLinks to false"),
        ("RUNNERD_PORT_50051_TCP_ADDR", "set enableServiceLinks to false"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_the_remedy(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the environment variable {name} is not a setting; ") as caught:
        load(environment={name: "1"})
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("2gib", 2**31),
        ("1.5 GB", 1_500_000_000),
        ("3k", 3000),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--runner-option", "a=1", "--runner-option", "a=2"], {}, "--runner-option: a is given twice, as '1' and '2'"),
        ([], {"RUNNERD_RUNNER_OPTION": "a=1,b=2,a=1"}, "RUNNERD_RUNNER_OPTION: a is given twice, as '1' and '1'"),
    ],
)
def test_an_option_of_a_runner_that_is_given_twice_is_refused(
    capsys, monkeypatch, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--runner", "sim", *arguments]) == 2
    assert message in capsys.readouterr().err
