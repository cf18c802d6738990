"""Chooses tokens from logits on the device, without a host wait. Knows nothing of models, KV caches or steps."""

from runnerd_torch.sampling.batch import SampleRow, SamplingBatch
from runnerd_torch.sampling.draw import Truncate
from runnerd_torch.sampling.logprobs import LogprobTensors
from runnerd_torch.sampling.outputs import row_outputs, token_logprobs
from runnerd_torch.sampling.sampler import Choose, SampledTensors, Sampler

__all__ = [
    "Choose",
    "LogprobTensors",
    "SampleRow",
    "SampledTensors",
    "Sampler",
    "SamplingBatch",
    "Truncate",
    "row_outputs",
    "token_logprobs",
]
