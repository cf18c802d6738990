"""The tutorial's plug-in, as its users get it: found by name, checked by the kit, served over gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_plugin import install, run_its_tests, runnerd, served

from runnerd_client import Client, InvalidRequestError

PLUGIN = Path(__file__).parents[1] / "plugin"
CORPUS = PLUGIN / "corpus.txt"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(PLUGIN, tmp_path_factory.mktemp("bigram"))


@pytest.fixture(scope="module")
def client(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with served(environment, tmp_path_factory.mktemp("log"), str(CORPUS), "--runner", "bigram") as client:
        yield client


def test_the_installed_plugin_is_listed(environment: dict[str, str]) -> None:
    assert "bigram: which byte follows which in a text file (bigram-runner 1.0)" in runnerd(environment, "runners")


def test_the_kit_finds_nothing_wrong_with_it(environment: dict[str, str]) -> None:
    report = runnerd(environment, "check-runner", "bigram", "--model", str(CORPUS), "--traces", "10")
    assert "0 broken" in report
    assert not re.search("^BROKEN", report, re.MULTILINE)


def test_its_project_runs_the_kit_as_tests(environment: dict[str, str], tmp_path: Path) -> None:
    assert " passed" in run_its_tests(PLUGIN, tmp_path, environment)


def test_it_is_served_over_grpc(client: Client) -> None:
    text = client.generate("the c", temperature=0, max_tokens=24, ignore_eos=True).outputs[0].text
    assert re.search(r"[a-z ]{10}", text)
    again = client.generate("the c", seed=7, max_tokens=24, ignore_eos=True).outputs[0].text
    assert client.generate("the c", seed=7, max_tokens=24, ignore_eos=True).outputs[0].text == again


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 3), ("frequency_penalty", 1.0), ("logit_bias", {1: 2.0}), ("logprobs", 2)]
)
def test_what_it_denies_is_refused_by_name(client: Client, field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        client.generate("the c", **{field: value})  # type: ignore[arg-type]
