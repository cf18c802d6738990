"""A whole decoder step in native code, for Llama-like models on the host's cores."""

from runnerd_torch.decoder.build import DecoderBuilder
from runnerd_torch.decoder.library import DecoderLibrary
from runnerd_torch.decoder.model import NativeDecoder
from runnerd_torch.decoder.packing import Quantization

__all__ = ["DecoderBuilder", "DecoderLibrary", "NativeDecoder", "Quantization"]
