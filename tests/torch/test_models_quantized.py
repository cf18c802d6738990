"""Quantized checkpoints: what can be read without further packages serves exactly; all else is refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runnerd_spi import ModelLoadError, RunnerConfig
from runnerd_torch.plugin import CPU

BLOCK = 16


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


def quantized(llama: Path, path: Path, **quantization: object) -> Path:
    """Copy the checkpoint and say in its config that it is quantized."""
    shutil.copytree(llama, path, dirs_exist_ok=True)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return path


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gptq", {"bits": 4, "group_size": 32}),
        ("awq", {"bits": 4, "group_size": 32}),
        ("bitsandbytes", {"load_in_4bit": True}),
        ("bitsandbytes", {"load_in_8bit": True}),
        ("compressed-tensors", {"config_groups": {}}),
        ("nvfp4", {}),
        ("some-new-method", {}),
    ],
)
def test_a_method_that_cannot_be_read_is_refused_by_its_name(method, settings, llama, tmp_path):
    path = quantized(llama, tmp_path, quant_method=method, **settings)
    runner = CPU.create(RunnerConfig(model=str(path), max_num_seqs=2, max_num_batched_tokens=32, block_size=4))
    try:
        with pytest.raises(ModelLoadError, match=f"quantized by {method}, .*take the unquantized model") as raised:
            runner.load(lambda stage, done, total: None)
    finally:
        runner.close()
    assert "\n" not in str(raised.value)


def test_an_fp8_checkpoint_gives_the_tokens_of_its_dequantized_weights(llama, tmp_path, open_runner, greedy):
    path = quantized(llama, tmp_path / "fp8", quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
    stored, plain = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = weight.bfloat16().float()
            continue
        blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
        # Powers of two, so that the product of value and scale is exact in every dtype.
        scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3), keepdim=True) / 448)))
        values = (blocks / scale).to(torch.float8_e4m3fn)
        stored[name] = values.view(weight.shape)
        stored[name.replace(".weight", ".weight_scale_inv")] = scale[:, 0, :, 0].contiguous()
        plain[name] = (values.float() * scale).view(weight.shape)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    oracle_path = Path(shutil.copytree(llama, tmp_path / "plain"))
    save_file(plain, oracle_path / "model.safetensors", {"format": "pt"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(oracle_path).eval()
    prompts = [[5, 9, 77, 31], [12, 100]]
    assert open_runner(path).generate(prompts, 10, chunk=3) == [greedy(oracle, prompt, 10) for prompt in prompts]
