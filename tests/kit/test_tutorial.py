"""The tutorial shows the plug-in that the tests build: it cannot drift from what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```\w+\n(.*?)^```$", (ROOT / "docs/write-a-runner.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["pyproject.toml", "bigram_runner.py", "tests/test_bigram.py"])
def test_the_tutorial_holds_the_file_as_it_is(name: str) -> None:
    assert (ROOT / "tests/plugin" / name).read_text() in BLOCKS


def test_the_asynchronous_variant_keeps_the_contract(tmp_path: Path) -> None:
    from runnerd_spi.testing import RULES, IsolatedKit, Job

    [methods] = [block for block in BLOCKS if "ThreadPoolExecutor(1)" in block]
    source = (ROOT / "tests/plugin/bigram_runner.py").read_text()
    timed = """
def run_timed(self, plan, begin):
    start = time.monotonic_ns()
    output = self.run(plan)
    return output, StepTimeline(begin, start, start, time.monotonic_ns(), time.monotonic_ns())

def close(self):
    if self.lifecycle.close() and hasattr(self, "device"):
        self.device.shutdown()
"""
    body = "".join(f"    {line}\n" if line else "\n" for line in (methods + timed).splitlines())
    extra = "from collections import deque\nfrom concurrent.futures import ThreadPoolExecutor\n"
    extra += "from dataclasses import replace\nfrom runnerd_spi import FutureStep\n"
    wrapped = f"class Async(BigramRunner):\n{body}\n"
    plugin = "PLUGIN = replace(PLUGIN, create=Async, capabilities=replace(PLUGIN.capabilities, max_in_flight=2))\n"
    (tmp_path / "async_bigram.py").write_text(f"{source}\n{extra}\n{wrapped}\n{plugin}")
    job = Job("async_bigram:PLUGIN", model=str(ROOT / "tests/plugin/corpus.txt"), num_traces=10)
    with pytest.MonkeyPatch.context() as patch, IsolatedKit(job) as kit:
        patch.syspath_prepend(str(tmp_path))
        results = list(kit.run(RULES))
    assert [result for result in results if result.status == "broken"] == []
