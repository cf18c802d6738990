"""The CUDA runner as the service finds it. Importing this module imports no framework.

It shares all but its start-up with the Ascend runner, whose tests execute the shared part. This runner itself was not
run on hardware here.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from runnerd_spi import ModelRunner, RunnerCapabilities, RunnerConfig, RunnerOption, RunnerPlugin, RunnerUnavailable
from runnerd_torch.plugin import ALLOW_PICKLE, MAX_LOGPROBS

_CAPABILITIES = RunnerCapabilities(
    max_in_flight=4,
    dtypes=("bfloat16", "float16", "float32"),
    block_sizes=(16, 8, 32, 64, 128, 4, 2, 1),
    typical_p="device",
    repetition_penalty="device",
    presence_penalty="device",
    frequency_penalty="device",
    logit_bias="device",
    allowed_token_ids="device",
    bad_words="device",
    min_tokens="device",
    logprobs="device",
    max_logprobs=MAX_LOGPROBS,
    prompt_logprobs="device",
    guided_decoding="host_sync",
)


def check_installation(packages: Path | None = None, devices: Path = Path("/dev")) -> None:
    """Look, without importing torch, whether it was built for CUDA and whether there is a GPU.

    Args:
        packages: Where torch is installed; None finds it.
        devices: Where the driver shows its GPUs.

    Raises:
        RunnerUnavailable: In one line, with the remedy.
    """
    if packages is None:
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            raise unavailable(f"{' and '.join(missing)} not installed; pip install 'runnerd[cpu]', then torch for CUDA")
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        packages = Path(spec.origin).parents[1]
    version = (packages / "torch" / "version.py").read_text()
    if re.search(r"^cuda\b.*= *None", version, re.MULTILINE):
        found = re.search(r"^__version__ *= *'([^']*)'", version, re.MULTILINE)
        raise unavailable(
            f"torch {found[1] if found else ''} is built without CUDA; install the build for CUDA as pytorch.org says"
        )
    # WSL has the one, all other Linux systems the other.
    if not (devices / "nvidiactl").exists() and not (devices / "dxg").exists():
        raise unavailable(
            "no NVIDIA driver is loaded; see whether `nvidia-smi` lists a GPU, and give a container its GPUs (--gpus)"
        )


def unavailable(reason: str) -> RunnerUnavailable:
    """Give the error that says why the runner cannot be used."""
    return RunnerUnavailable(f"runner 'cuda' cannot be used: {reason}")


def _create(config: RunnerConfig) -> ModelRunner:
    check_installation()
    # torch takes seconds to import: only whoever creates a runner pays for it.
    from runnerd_torch.cuda.create import create_cuda_runner

    return create_cuda_runner(config)


CUDA = RunnerPlugin(
    name="cuda",
    description="PyTorch on an NVIDIA GPU (not run on hardware here): models from transformers over a paged KV cache",
    capabilities=_CAPABILITIES,
    create=_create,
    options=(
        RunnerOption("device_index", int, 0, "which of the visible GPUs"),
        RunnerOption("model_impl", str, "auto", "model code: auto, transformers or fused (Llama-like models only)"),
        ALLOW_PICKLE,
    ),
    check=check_installation,
)
