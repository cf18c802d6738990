"""What the fused attention of Ascend does not serve: refused by name, or served by plain PyTorch with a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from driving import make_checkpoint, open_npu, prompts_of, torch_driving
from runnerd_spi import InvalidOption, ModelLoadError
from runnerd_torch.ascend.attention import unserved_reason
from runnerd_torch.models import LayerSpec

SERVED = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 0.1, "sliding_window": None, "softcap": None}
REFUSED = {
    "window": ({"sliding_window": 4096}, "a sliding window of 4096 tokens"),
    "softcap": ({"softcap": 50.0}, "soft-capped scores"),
    "odd heads": ({"head_dim": 72}, "heads of 72, expected a multiple of 16 up to 512"),
    "wide heads": ({"head_dim": 528}, "heads of 528"),
    "many heads": ({"num_heads": 272, "num_kv_heads": 8}, "272 heads, expected 256 at most"),
    "large groups": ({"num_heads": 128, "num_kv_heads": 1}, "128 heads over 1 KV heads, expected 64 to one at most"),
    "wide cache": ({"num_heads": 256, "num_kv_heads": 256, "head_dim": 256}, "expected 65535 numbers at most"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_layer_outside_the_documented_range_is_named(change, reason):
    layers = [LayerSpec(**SERVED), LayerSpec(**(SERVED | change))]
    found = unserved_reason(layers, torch.bfloat16, 64)
    assert "layer 1 has" in found
    assert reason in found
    assert unserved_reason(layers[:1], torch.bfloat16, 64) == ""


def test_float32_and_more_rows_than_the_kernel_takes_are_named():
    layers = [LayerSpec(**SERVED)]
    assert "bfloat16 and float16, and the model is float32" in unserved_reason(layers, torch.float32, 64)
    assert unserved_reason(layers, torch.float32, 64, allow_float32=True) == ""
    assert "4096 rows at most, and --max-num-seqs is 5000" in unserved_reason(layers, torch.float16, 5000)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "MistralConfig", sliding_window=50)


def test_a_model_with_windows_is_refused_when_the_fused_attention_was_asked_for(windowed):
    refusal = pytest.raises(
        ModelLoadError, match=r"does not serve it: layer 0 has a sliding window .* choose attention"
    )
    with refusal, open_npu(windowed, {"attention": "fused"}):
        pass


def test_a_model_with_windows_falls_back_with_a_warning(windowed, caplog):
    prompts = prompts_of([3, 140])
    with caplog.at_level(logging.WARNING), open_npu(windowed, {"attention": "auto"}, max_in_flight=2) as driver:
        tokens = driver.generate(prompts, 6)
    assert "falling back to plain PyTorch" in caplog.text
    with open_npu(windowed, {"attention": "torch"}) as driver:
        assert driver.generate(prompts, 6, chunk=40) == tokens


def test_a_graph_of_no_size_is_refused(windowed):
    with (
        pytest.raises(InvalidOption, match="max_graph_batch is 0, expected 1 or more"),
        open_npu(windowed, {"max_graph_batch": 0}),
    ):
        pass


def test_batches_above_the_largest_graph_are_launched_and_counted(tmp_path):
    model = make_checkpoint(tmp_path, "LlamaConfig")
    prompts = prompts_of([3, 5, 7])
    uses = []
    with open_npu(model, {"max_graph_batch": 2}) as driver:
        requests = [torch_driving.Request(prompt, 8) for prompt in prompts]
        for count in (3, 2):
            for one in requests[:count]:
                driver.admit(one)
            driver.take(*driver.step(requests[:count]))
            handle, computing = driver.step(requests[:count])
            driver.take(handle, computing)
            uses.append(handle.timeline.graph)
            for one in requests[:count]:
                driver.release(one)
    assert uses == ["missed", "replayed"]
