"""The conformance kit on the Ascend runner."""

from __future__ import annotations

import pytest

from driving import make_checkpoint
from runnerd_spi.testing import RULES, IsolatedKit, Job


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ascend_runner_keeps_every_rule(tmp_path):
    job = Job("ascend", model=str(make_checkpoint(tmp_path, "Qwen3Config")), dtype="float32", num_traces=20, limit=600)
    with IsolatedKit(job) as kit:
        results = list(kit.run(RULES))
    assert [one for one in results if one.status != "holds"] == []
