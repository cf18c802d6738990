"""The CUDA runner says in one line why it cannot be used. On a GPU it was not run: what runs there is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runnerd_spi import InvalidOption, RunnerConfig, RunnerUnavailable, load_runner
from runnerd_torch.cuda.create import create_cuda_runner, open_device
from runnerd_torch.cuda.plugin import CUDA, check_installation
from runnerd_torch.plugin import CPU


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Where a torch built for CUDA is installed."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    return tmp_path


def test_the_runner_is_found_by_its_name() -> None:
    assert load_runner("cuda") is CUDA


def test_it_promises_what_the_cpu_runner_does() -> None:
    # The code is the same.
    names = [name for name in CPU.capabilities.__slots__ if name not in ("dtypes", "block_sizes", "shares_host_cores")]
    assert all(getattr(CUDA.capabilities, name) == getattr(CPU.capabilities, name) for name in names)


def test_a_torch_without_cuda_is_named(packages: Path) -> None:
    version = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    (packages / "torch" / "version.py").write_text(version)
    with pytest.raises(RunnerUnavailable, match=r"^runner 'cuda' .*: torch 2\.13\.0\+cpu is built without CUDA"):
        check_installation(packages)


def test_a_missing_driver_is_named(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(RunnerUnavailable, match=r"no NVIDIA driver is loaded; see whether `nvidia-smi`"):
        check_installation(packages, tmp_path)


@pytest.mark.parametrize("node", ["nvidiactl", "dxg"])
def test_a_driver_and_a_torch_for_it_are_enough(packages: Path, tmp_path: Path, node: str) -> None:
    (tmp_path / node).touch()
    check_installation(packages, tmp_path)


def test_no_gpu_is_refused_with_what_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RunnerUnavailable, match=r"CUDA finds no GPU; see whether `nvidia-smi`"):
        open_device(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(RunnerUnavailable, match="CUDA finds no GPU among CUDA_VISIBLE_DEVICES=7"):
        open_device(0)


@pytest.mark.parametrize(("count", "index", "expected"), [(1, 1, "0"), (4, 4, "0 to 3"), (4, -1, "0 to 3")])
def test_an_index_out_of_range_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, index: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InvalidOption, match=f"device_index is {index}, expected {expected}; this machine has {count}"):
        open_device(index)


def test_a_model_implementation_that_there_is_not_is_refused() -> None:
    config = RunnerConfig(4, 64, 16, options={"model_impl": "quick"})
    with pytest.raises(InvalidOption, match="model_impl is 'quick', expected auto, transformers, fused"):
        create_cuda_runner(config)
