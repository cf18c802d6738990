"""Decides whether a model's step is one call of native code."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from runnerd_spi import ModelLoadError, RunnerUnavailable
from runnerd_torch.decoder.library import DecoderLibrary
from runnerd_torch.decoder.model import NativeDecoder, reason_against
from runnerd_torch.decoder.packing import Quantization
from runnerd_torch.models import TransformersModel
from runnerd_torch.native.compile import CompileError

logger = logging.getLogger(__name__)


class DecoderBuilder:
    """Makes a :class:`NativeDecoder` of each model that it serves.

    Args:
        quantization: Of the weights; other than "none" only native code serves.
        required: Whether the operator asked for native code: it is an error then if a model gets none.
    """

    def __init__(self, quantization: Quantization, *, required: bool) -> None:
        self.quantization = quantization
        self._required = required or quantization != "none"
        self._library: DecoderLibrary | None = None

    def prepare(self) -> None:
        """Compile the code, which takes seconds the first time.

        Raises:
            RunnerUnavailable: It is required and cannot be compiled or loaded.
        """
        try:
            self._library = DecoderLibrary()
        except (CompileError, OSError) as error:
            if self._required:
                raise RunnerUnavailable(
                    f"the native decoder cannot be used: {error}; or choose model_impl fused and quantization none, "
                    "which is slower"
                ) from error
            logger.warning("the native decoder cannot be used, falling back to torch, which is slower: %s", error)

    def build(self, name: str, network: PreTrainedModel, probed: TransformersModel) -> NativeDecoder | None:
        """Give the decoder; None: the model needs another.

        Args:
            name: Of the model, for messages.
            network: A model that the fused path serves.
            probed: The generic path over it.

        Raises:
            ModelLoadError: It is required and does not serve the model.
        """
        if self._library is None:
            return None
        reason = reason_against(network, probed, self.quantization)
        if reason is None:
            return NativeDecoder(network, probed, self._library, self.quantization)
        if self._required:
            raise ModelLoadError(
                f"{name}: the native decoder does not serve this {type(network).__name__}: {reason}; "
                "choose model_impl auto and quantization none"
            )
        logger.info("%s is not served by the native decoder: %s", name, reason)
        return None

    def refuse(self, name: str, kind: str) -> None:
        """Refuse a model that is not of the families of the fused path, where native code is required.

        Raises:
            ModelLoadError: It is.
        """
        if self._required:
            raise ModelLoadError(
                f"{name}: the native decoder serves Llama, Mistral, Qwen2 and Qwen3 models with plain weights, not "
                f"this {kind}; choose model_impl auto and quantization none"
            )
