"""Every causal language model that transformers knows is served exactly or refused at load; none is served wrongly."""

from __future__ import annotations

import inspect
import random
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from runnerd_spi import ModelLoadError

MAX_PARAMETERS = 5_000_000
# Under the names of all families: a config class takes those it knows.
SIZES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "d_model": 32,
    "n_positions": 128,
    "rotary_dim": 4,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
}
# Its generate is not that of its language model: it also makes sound.
OTHER_GENERATE = {"MoshiConfig"}


def tiny_model(config_class: type, settings: dict[str, object]) -> transformers.PreTrainedModel | None:
    """Give a random model; None: the class does not take sizes by these names."""
    window = {"sliding_window": 5} if "sliding_window" in inspect.signature(config_class.__init__).parameters else {}
    try:
        config = config_class(**settings, **SIZES, **window)
        text = config.get_text_config(decoder=True).to_dict()
        if text.get("hidden_size", 0) > 64 or text.get("vocab_size", 0) > 1000:
            return None
        torch.manual_seed(0)
        with torch.device("meta"):
            if transformers.AutoModelForCausalLM.from_config(config).num_parameters() > MAX_PARAMETERS:
                return None
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - whatever two hundred classes raise over sizes they do not expect
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_no_architecture_is_served_wrongly(tiny_settings, open_runner, greedy) -> None:
    settings = {name: value for name, value in tiny_settings.items() if name != "head_dim"}
    dice = random.Random(7)
    prompts = [[dice.randrange(3, 160) for _ in range(length)] for length in (1, 9, 21)]
    served, refused, wrong = set(), set(), set()
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = config_class.__name__
        model = None if name in OTHER_GENERATE else tiny_model(config_class, settings)
        if model is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                model.save_pretrained(folder)
                oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                expected = [greedy(oracle, prompt, 10) for prompt in prompts]
            except Exception:  # noqa: BLE001 - transformers itself cannot run it at this size
                continue
            try:
                driver = open_runner(Path(folder))
            except ModelLoadError:
                refused.add(name)
                continue
            is_right = driver.generate(prompts, 10) == driver.generate(prompts, 10, chunk=7) == expected
            (served if is_right else wrong).add(name)
            driver.runner.close()
    assert wrong == set()
    assert len(served) >= 60
    assert len(refused) >= 20
