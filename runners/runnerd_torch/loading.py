"""Reads a model from a directory or a GGUF file, or says in one line why it cannot be served.

Nothing is fetched: the path is local, and the hub client is switched off before it is imported. This module knows
nothing of steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runnerd_spi import ModelInfo, ModelLoadError, Progress, RunnerConfig

# Read once by huggingface_hub when it is imported, so it has to stand before the import of transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.utils import logging as transformers_logging

from runnerd_torch.decoder import DecoderBuilder, NativeDecoder
from runnerd_torch.devices.base import Device
from runnerd_torch.fused import FusedModel, can_fuse
from runnerd_torch.gguf_reading import quick_gguf_reading
from runnerd_torch.layer_ops import LayerOps
from runnerd_torch.limits import (
    eos_token_ids,
    intermediate_size,
    model_length,
    quantization,
    refuse_architecture,
    refuse_quantization,
)
from runnerd_torch.linear import LinearFactory
from runnerd_torch.memory import ModelShape
from runnerd_torch.models import ATTENTION_NAME, PagedModel, TransformersModel, register_attention
from runnerd_torch.sampling import Choose

ModelImpl = Literal["auto", "transformers", "fused", "native"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WHAT_IS_A_MODEL = "expected a directory with config.json and *.safetensors, or a .gguf file"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device, and what is known of it."""

    model: PagedModel
    info: ModelInfo
    shape: ModelShape
    choose: Choose | None = None
    """The model's own search for the highest logits; None: PyTorch's."""


def load_model(
    config: RunnerConfig,
    device: Device,
    progress: Progress,
    model_impl: ModelImpl,
    make_linear: LinearFactory,
    layer_ops: LayerOps,
    decoders: DecoderBuilder | None = None,
) -> LoadedModel:
    """Read the weights and put them on the device.

    Args:
        config: What the operator chose.
        device: The chip.
        progress: Told how far it is.
        model_impl: Whose forward to run; "auto" takes the fused one where there is one.
        make_linear: Makes the projections of the fused one.
        layer_ops: What the fused one does between them.
        decoders: Makes native decoders, which come before the fused one; None: there are none.

    Raises:
        ModelLoadError: The model cannot be read or served; the message says why and what to do.
    """
    path = find_checkpoint(config.model, allow_pickle=bool(config.options.get("allow_pickle", False)))
    transformers_logging.set_verbosity_error()
    register_attention()
    with _reading(path, progress):
        settings = _call(path, "config", lambda: _read_config(path, config))
        refuse_architecture(path.name, settings)
        refuse_quantization(path.name, settings)
        max_model_len = model_length(path.name, settings, config.max_model_len)
        dtype = _choose_dtype(config.dtype, None if path.is_file() else settings.dtype, device, decoders)
        network = _call(path, "weights", lambda: _read_weights(path, config, settings, dtype), quantization(settings))
    _check_room(path, network, device)
    network = network.to(device.torch_device).eval().requires_grad_(False)
    parameters = list(network.parameters())
    num_parameters = sum(one.numel() for one in parameters)
    weights_bytes = _num_bytes(network)
    del parameters
    paged = _call(
        path, "model", lambda: _build_model(path, network, model_impl, make_linear, layer_ops, decoders, max_model_len)
    )
    if isinstance(paged, NativeDecoder):
        weights_bytes = paged.weights_bytes
    info = ModelInfo(
        name=path.stem if path.is_file() else path.name,
        architecture=type(network).__name__,
        vocab_size=paged.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(network.config, network.generation_config),
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        device=device.description,
    )
    shape = ModelShape(
        layers=paged.layers,
        vocab_size=paged.vocab_size,
        hidden_size=network.config.get_text_config(decoder=True).hidden_size,
        intermediate_size=intermediate_size(network.config),
        dtype=dtype,
        weights_bytes=weights_bytes,
        max_model_len=max_model_len,
    )
    return LoadedModel(paged, info, shape, paged.choose if isinstance(paged, NativeDecoder) else None)


def _build_model(
    path: Path,
    network: transformers.PreTrainedModel,
    model_impl: ModelImpl,
    make_linear: LinearFactory,
    layer_ops: LayerOps,
    decoders: DecoderBuilder | None,
    max_model_len: int,
) -> PagedModel:
    probed = TransformersModel(network)
    fusible = can_fuse(network)
    if model_impl == "fused" and not fusible:
        raise ModelLoadError(
            f"{path}: model_impl fused does not serve this {type(network).__name__}; choose auto or transformers"
        )
    if not fusible and decoders is not None:
        decoders.refuse(path.name, type(network).__name__)
    if not fusible or model_impl == "transformers":
        return probed
    decoder = None if decoders is None else decoders.build(path.name, network, probed)
    if decoder is not None:
        return decoder
    return FusedModel(network, probed, make_linear, layer_ops, max_model_len)


def _check_room(path: Path, network: transformers.PreTrainedModel, device: Device) -> None:
    """Refuse a model that the device's memory cannot hold; on the CPU it is in memory already."""
    if device.torch_device.type == "cpu":
        return
    needed, free = _num_bytes(network), device.memory().free_bytes
    if needed > free:
        raise ModelLoadError(
            f"{path}: the weights take {needed} bytes, but {device.description} has {free} bytes free; free the "
            "device, or choose another one, a smaller model or a smaller dtype"
        )


def _num_bytes(network: transformers.PreTrainedModel) -> int:
    return sum(one.numel() * one.element_size() for one in (*network.parameters(), *network.buffers()))


def find_checkpoint(model: str | None, *, allow_pickle: bool = False) -> Path:
    """Give the path of a model that looks readable.

    Args:
        model: As the operator named it.
        allow_pickle: Take a directory whose weights are a pickle.

    Raises:
        ModelLoadError: There is none at ``model``.
    """
    if not model:
        raise ModelLoadError(f"no model was named; {_WHAT_IS_A_MODEL}")
    path = Path(model).expanduser().absolute()
    if not path.exists():
        raise ModelLoadError(f"{model}: no such file or directory; {_WHAT_IS_A_MODEL}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{model}: not a GGUF file; {_WHAT_IS_A_MODEL}")
        return path
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{model}: has no config.json; {_WHAT_IS_A_MODEL}")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(one.name for pattern in ("*.bin", "*.pt", "*.pth") for one in path.glob(pattern))
        if allow_pickle and "pytorch_model" in "".join(pickles):
            return path
        found = (
            f"its weights are a pickle ({pickles[0]}), which can run code when read; convert it to safetensors, or "
            "set the runner option allow_pickle=true if you trust it"
            if pickles
            else f"has no *.safetensors; {_WHAT_IS_A_MODEL}"
        )
        raise ModelLoadError(f"{model}: {found}")
    return path


def _read_config(path: Path, config: RunnerConfig) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(**_source(path, config))


def _read_weights(
    path: Path, config: RunnerConfig, settings: transformers.PretrainedConfig, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    more = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)}
        if path.is_file()
        else {"use_safetensors": any(path.glob("*.safetensors")), "weights_only": True}
    )
    network, notes = transformers.AutoModelForCausalLM.from_pretrained(
        **_source(path, config),
        **more,
        config=settings,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    lacking = sorted([*notes["missing_keys"], *(str(one[0]) for one in notes["mismatched_keys"])])
    if lacking:
        raise ModelLoadError(
            f"{path}: {len(lacking)} weights are missing or have a wrong shape (the first is {lacking[0]}); "
            "the checkpoint does not fit its config, get it anew"
        )
    return network


def _source(path: Path, config: RunnerConfig) -> dict[str, Any]:
    where = (
        {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_file()
        else {"pretrained_model_name_or_path": str(path)}
    )
    return where | {"local_files_only": True, "trust_remote_code": config.trust_remote_code}


def _choose_dtype(
    asked: str, checkpoint: torch.dtype | None, device: Device, decoders: DecoderBuilder | None
) -> torch.dtype:
    if decoders is not None and decoders.quantization != "none":
        if asked not in ("auto", "bfloat16"):
            raise ModelLoadError(
                f"dtype {asked!r} with quantization {decoders.quantization}: what is not quantized is bfloat16; "
                "choose --dtype auto or bfloat16"
            )
        return torch.bfloat16
    if asked == "auto":
        return device.preferred_dtype(checkpoint)
    if asked not in _DTYPES:
        raise ModelLoadError(f"dtype {asked!r}, expected auto, {', '.join(_DTYPES)}")
    return _DTYPES[asked]


def _call(path: Path, what: str, read: Callable[[], Any], method: str | None = None) -> Any:
    """Turn whatever the libraries raise over a bad checkpoint into one line; ``method`` quantized it."""
    try:
        return read()
    except ModelLoadError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            # Such a model looks its attention up in a table of its own.
            raise ModelLoadError(
                f"{path}: does not attend through transformers' attention interface; "
                "such a model cannot use a paged KV cache"
            ) from error
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        if method is not None:
            raise ModelLoadError(
                f"{path}: the checkpoint is quantized by {method}, which cannot be read here: {first_line}; "
                "take the unquantized model or a GGUF file"
            ) from error
        raise ModelLoadError(
            f"{path}: cannot read the {what}: {type(error).__name__}: {first_line}; "
            "check that the files are complete and of an architecture that transformers "
            f"{transformers.__version__} knows"
        ) from error


@contextmanager
def _reading(path: Path, progress: Progress) -> Iterator[None]:
    """Report the progress that transformers would show as bars, and show none."""

    def bar(items: Any, **options: Any) -> _Bar:
        return _Bar(items, "converting weights" if "GGUF" in options.get("desc", "") else "loading weights", progress)

    before = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: bar(*args, **kwargs))
    try:
        with quick_gguf_reading(bar) if path.is_file() else nullcontext():
            yield
    finally:
        transformers_logging.set_tqdm_hook(before)


class _Bar:
    """Passes items on and reports how many have gone."""

    def __init__(self, items: Any, stage: str, progress: Progress) -> None:
        self._items = items
        self._stage = stage
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items)
        for done, item in enumerate(self._items):
            self._progress(self._stage, done, total)
            yield item
        self._progress(self._stage, total, total)
