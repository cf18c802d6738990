"""The page of request fields is complete: a row for each field, tests that exist, runners as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_service.frontend.validation import capability_map
from runnerd_sim.plugin import SIM
from runnerd_spi import RunnerPlugin
from runnerd_torch.ascend.plugin import ASCEND
from runnerd_torch.cuda.plugin import CUDA
from runnerd_torch.plugin import CPU

ROOT = Path(__file__).parents[2]
WHOLE_VALUES = {"google.protobuf.Duration", "google.protobuf.Struct"}
RUNNERS = (CPU, CUDA, ASCEND, SIM)


def fields_of(message: Descriptor, prefix: str = "") -> Iterator[str]:
    for one in message.fields:
        inner = one.message_type
        if inner is None or inner.GetOptions().map_entry or inner.full_name in WHOLE_VALUES:
            yield prefix + one.name
        else:
            yield from fields_of(inner, f"{prefix}{one.name}.")


FIELDS = tuple(fields_of(GenerateRequest.DESCRIPTOR))


def rows() -> list[tuple[str, str, list[str]]]:
    """Give field, who serves it, and tests."""
    found = []
    for line in (ROOT / "docs" / "request-fields.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            field, served, _, tests = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((field.strip("`"), served, re.findall(r"`([^`]+)`", tests)))
    return found


def test_every_field_has_one_row_and_every_row_a_field() -> None:
    assert [field for field, _, _ in rows()] == sorted((field for field, _, _ in rows()), key=FIELDS.index)
    assert [field for field, _, _ in rows()] == list(FIELDS)


def test_every_test_that_a_row_names_exists() -> None:
    for field, _, tests in rows():
        assert tests, field
        for one in tests:
            path, name = one.split("::")
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), one


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda one: one.name)
def test_who_serves_a_field_is_what_the_runners_say(runner: RunnerPlugin) -> None:
    support = capability_map(runner.capabilities)
    named = {
        "guided_decoding": "guided_decoding",
        "adapter": "lora",
        "output.pooling": "embeddings",
        "chat.messages.parts.image_url": "multimodal",
    }
    checked = set()
    for field, served, _ in rows():
        assert served in ("all", "none"), field
        capability = named.get(field.split(".")[0]) or named.get(field) or field.split(".")[-1]
        if capability in support and field not in ("text", "token_ids.ids"):
            assert (served == "all") == (support[capability] != "no"), field
            checked.add(capability)
    assert checked >= {"temperature", "min_p", "bad_words", "min_tokens", "prompt_logprobs", *named.values()}
