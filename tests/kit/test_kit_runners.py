"""The runners in the box keep the contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from runnerd_spi.testing import RULES, IsolatedKit, Job, Result


def check(job: Job) -> list[Result]:
    with IsolatedKit(job) as kit:
        return [result for result in kit.run(RULES) if result.status != "holds"]


def test_the_simulated_runner_keeps_every_rule() -> None:
    assert check(Job("sim", num_traces=20)) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"model_impl": "fused"}, {"model_impl": "transformers"}], ids=str)
def test_the_cpu_runner_keeps_every_rule(options: Mapping[str, str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        # Wide enough that the highest logit stands out of rounding.
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    more = {"num_threads": "1", "attention": "torch", "linear": "torch"}
    left = check(Job("cpu", {**options, **more}, str(tmp_path), "float32", limit=600.0))
    assert left == []
