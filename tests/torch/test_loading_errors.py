"""A model that cannot be read or served is refused in one line that says why and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from runnerd_spi import InvalidOption, ModelLoadError, RunnerConfig
from runnerd_torch.plugin import CPU


def load(model: Path | str | None, **settings):
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4}
    config = RunnerConfig(model=None if model is None else str(model), **(defaults | settings))
    runner = CPU.create(config)
    try:
        return runner.load(lambda stage, done, total: None)
    finally:
        runner.close()


def refusal(model: Path | str | None, **settings) -> str:
    with pytest.raises(ModelLoadError) as raised:
        load(model, **settings)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def change_config(path: Path, **settings) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_no_model_named():
    assert "no model was named" in refusal(None)


def test_a_path_that_does_not_exist(tmp_path):
    message = refusal(tmp_path / "absent")
    assert "no such file or directory" in message
    assert ".gguf" in message


def test_a_name_of_the_hub_is_not_looked_up():
    assert "no such file or directory" in refusal("someone/some-model")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else")
    assert "not a GGUF file" in refusal(tmp_path / "model.gguf")


def test_a_damaged_gguf(tmp_path, demo_gguf):
    (tmp_path / "cut.gguf").write_bytes(demo_gguf.read_bytes()[:5000])
    assert "cannot read the config" in refusal(tmp_path / "cut.gguf")


def test_a_directory_without_config(copy):
    (copy / "config.json").unlink()
    assert "no config.json" in refusal(copy)


def test_a_config_that_is_no_json(copy):
    (copy / "config.json").write_text("{")
    assert "cannot read the config" in refusal(copy)


def test_an_unknown_architecture(copy):
    change_config(copy, model_type="nosuchmodel", architectures=["NoSuchModel"])
    assert "nosuchmodel" in refusal(copy)


def test_a_directory_without_weights(copy):
    (copy / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(copy)


def test_a_pickle_checkpoint(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    message = refusal(copy)
    assert "pytorch_model.bin" in message
    assert "convert it to safetensors" in message
    assert "allow_pickle" in message


def test_a_pickle_checkpoint_is_read_when_that_is_asked_for(copy):
    expected = load(copy)
    torch.save(safetensors.torch.load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    assert load(copy, options={"allow_pickle": True}) == expected


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_would_run_code_runs_none_even_when_pickles_are_allowed(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    torch.save({"a": Malicious(tmp_path / "run")}, copy / "pytorch_model.bin")
    assert "cannot read the weights" in refusal(copy, options={"allow_pickle": True})
    assert not (tmp_path / "run").exists()


def test_truncated_weights(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot read the weights" in refusal(copy)


def test_a_checkpoint_that_lacks_weights(copy):
    change_config(copy, num_hidden_layers=5)
    message = refusal(copy)
    assert "missing" in message
    assert "model.layers.3" in message


def test_weights_of_another_shape(copy):
    change_config(copy, intermediate_size=80)
    refusal(copy)


def test_a_length_above_the_models(llama):
    message = refusal(llama, max_model_len=4096)
    assert "4096" in message
    assert "128" in message


def test_an_unknown_dtype(llama):
    assert "int3" in refusal(llama, dtype="int3")


def test_an_option_that_means_nothing(llama):
    with pytest.raises(InvalidOption, match="num_threads"):
        load(llama, options={"num_threads": -1})
    for name in ("attention", "linear", "model_impl"):
        with pytest.raises(InvalidOption, match=name):
            load(llama, options={name: "magic"})


def test_a_fused_forward_is_refused_where_there_is_none(make_checkpoint):
    assert "model_impl fused" in refusal(make_checkpoint("GPT2Config"), options={"model_impl": "fused"})
