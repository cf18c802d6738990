"""What load tells of a model, and what profile leaves for its KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from runnerd_spi import RunnerConfig
from runnerd_torch.devices import host
from runnerd_torch.devices.cpu import DEFAULT_KV_BYTES, CpuDevice
from runnerd_torch.plugin import CPU


@pytest.fixture
def profiled():
    """Give a function that loads and profiles: ``profiled(path, **config) -> info, budget, progress``."""
    runners = []

    def run(path: Path, **settings):
        defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4, "options": {"num_threads": 2}}
        runners.append(CPU.create(RunnerConfig(model=str(path), **(defaults | settings))))
        progress = []
        info = runners[-1].load(lambda *step: progress.append(step))
        return info, runners[-1].profile(), progress

    yield run
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


def test_info_holds_the_models_figures(llama, profiled):
    info, _, _ = profiled(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert info.name == llama.name
    assert info.architecture == "LlamaForCausalLM"
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (160, 128, (2,))
    assert info.num_parameters == model.num_parameters()
    assert info.weights_bytes >= 4 * info.num_parameters
    assert info.device == "cpu (2 threads)"


def test_a_shorter_length_is_taken(llama, profiled):
    info, budget, _ = profiled(llama, max_model_len=30)
    assert info.max_model_len == 30
    assert budget.max_num_blocks == 2 * 8


def test_every_end_token_of_both_configs_counts(make_checkpoint, profiled):
    path = make_checkpoint("LlamaConfig", eos_token_id=[2, 5])
    generation = transformers.GenerationConfig.from_pretrained(path)
    generation.eos_token_id = [2, 9]
    generation.save_pretrained(path)
    assert profiled(path)[0].eos_token_ids == (2, 5, 9)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_dtype_is_the_checkpoints_where_the_cpu_has_it_natively(stored, llama, tmp_path, profiled):
    transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=stored).save_pretrained(tmp_path)
    native = {
        torch.float32: True,
        torch.bfloat16: host.has_native_bfloat16(),
        torch.float16: host.has_native_float16(),
    }[stored]
    info, _, _ = profiled(tmp_path)
    assert info.dtype == (str(stored).removeprefix("torch.") if native else "float32")


def test_a_quantized_checkpoint_is_dequantized_to_what_the_cpu_has(smollm2):
    assert CpuDevice().preferred_dtype(None) in (torch.bfloat16, torch.float32)
    assert (CpuDevice().preferred_dtype(None) == torch.bfloat16) == host.has_native_bfloat16()


def test_progress_counts_every_weight(llama, profiled):
    _, _, progress = profiled(llama)
    loading = [(done, total) for stage, done, total in progress if stage == "loading weights"]
    total = loading[-1][1]
    assert loading == [(done, total) for done in range(total + 1)]
    assert total == 30


def test_a_block_holds_keys_and_values_of_all_layers(llama, profiled):
    _, budget, _ = profiled(llama, dtype="float32")
    assert budget.bytes_per_block == 2 * 3 * 4 * 2 * 16 * 4


def test_memory_bytes_is_the_budget(llama, profiled):
    _, budget, _ = profiled(llama, memory_bytes=123_456)
    assert budget.available_bytes == 123_456


def test_without_a_size_the_cache_takes_the_default_at_most(llama, profiled):
    _, whole, _ = profiled(llama, memory_fraction=1.0)
    _, sliver, _ = profiled(llama, memory_fraction=1e-9)
    assert 0 < whole.available_bytes <= DEFAULT_KV_BYTES
    assert sliver.available_bytes == 0


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_cgroup_bounds_the_memory(tmp_path):
    write(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert host.memory_bytes(tmp_path) == (1000 * 1024, 800 * 1024)
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("500000\n")
    (cgroup / "memory.current").write_text("300000\n")
    (cgroup / "memory.stat").write_text("anon 100000\ninactive_file 50000\n")
    assert host.memory_bytes(tmp_path) == (500000, 250000)
    (cgroup / "memory.max").write_text("max\n")
    assert host.memory_bytes(tmp_path) == (1000 * 1024, 800 * 1024)


def test_a_cgroup_quota_bounds_the_cores(tmp_path):
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert host.usable_cores(tmp_path) == 1
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert host.usable_cores(tmp_path) == host.usable_cores(tmp_path / "nowhere")


def test_number_formats_are_read_from_the_cpus_flags(tmp_path):
    write(tmp_path, proc__cpuinfo="flags : fpu avx2 avx512_bf16\n")
    assert host.has_native_bfloat16(tmp_path)
    assert not host.has_native_float16(tmp_path)
