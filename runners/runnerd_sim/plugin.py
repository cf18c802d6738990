"""The entry point of the simulated runner: what it can do, as data. Imports neither numpy nor the runner itself."""

from __future__ import annotations

from runnerd_sim.options import OPTIONS
from runnerd_spi import ModelRunner, RunnerCapabilities, RunnerConfig, RunnerPlugin

CAPABILITIES = RunnerCapabilities(
    max_in_flight=4,
    dtypes=("float32",),
    block_sizes=(16, 1, 2, 4, 8, 32, 64, 128),
    tokenizer="bytes",
    needs_model=False,
    typical_p="device",
    repetition_penalty="device",
    presence_penalty="device",
    frequency_penalty="device",
    logit_bias="device",
    allowed_token_ids="device",
    bad_words="device",
    min_tokens="device",
    logprobs="device",
    max_logprobs=20,
    prompt_logprobs="device",
    guided_decoding="host_sync",
)


def _create(config: RunnerConfig) -> ModelRunner:
    from runnerd_sim.runner import SimModelRunner  # here, so that listing and checking runners stays cheap

    return SimModelRunner(config, CAPABILITIES)


SIM = RunnerPlugin(
    name="sim",
    description="a simulated device with a clock; no model, no torch",
    capabilities=CAPABILITIES,
    create=_create,
    options=OPTIONS,
)
