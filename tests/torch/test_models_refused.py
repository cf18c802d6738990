"""Models that a paged KV cache cannot serve are refused at load with the reason; what layers need is found out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from runnerd_spi import ModelLoadError, RunnerConfig
from runnerd_torch.limits import model_length
from runnerd_torch.models import ATTENTION_NAME, LayerSpec, TransformersModel, register_attention
from runnerd_torch.plugin import CPU


def refusal(path: Path, **settings) -> str:
    runner = CPU.create(
        RunnerConfig(model=str(path), max_num_seqs=2, max_num_batched_tokens=32, block_size=4, **settings)
    )
    try:
        with pytest.raises(ModelLoadError) as raised:
            runner.load(lambda stage, done, total: None)
    finally:
        runner.close()
    return str(raised.value)


def test_a_recurrent_model_is_refused(make_checkpoint):
    path = make_checkpoint("MambaConfig", state_size=4, conv_kernel=4, time_step_rank=4, max_position_embeddings=None)
    assert "recurrent state" in refusal(path)


def test_a_hybrid_that_is_recurrent_inside_each_layer_is_refused(make_checkpoint):
    path = make_checkpoint("FalconH1Config", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
    assert "recurrent state" in refusal(path)


def test_layers_that_convolve_are_refused(make_checkpoint):
    path = make_checkpoint("Lfm2Config", layer_types=["conv", "full_attention", "conv"])
    assert "conv" in refusal(path)


def test_an_encoder_decoder_is_refused(tmp_path):
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "encoder-decoder" in refusal(tmp_path)


def test_a_position_bias_in_attention_is_refused(make_checkpoint):
    path = make_checkpoint("BloomConfig", n_layer=2, n_head=4, seq_length=64, max_position_embeddings=64)
    assert "attention" in refusal(path)


def test_attention_sinks_are_refused(make_checkpoint):
    path = make_checkpoint("GptOssConfig", num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    assert "s_aux" in refusal(path)


def test_heads_of_two_sizes_are_refused(make_checkpoint):
    path = make_checkpoint(
        "DeepseekV3Config",
        num_key_value_heads=4,
        head_dim=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )
    assert "expected one size" in refusal(path)


@pytest.mark.parametrize("config_class", ["BertConfig", "RobertaConfig", "ElectraConfig", "ErnieConfig"])
def test_an_encoder_that_is_also_published_as_a_language_model_is_refused(config_class, make_checkpoint):
    assert "attends to later tokens" in refusal(make_checkpoint(config_class))


@pytest.mark.parametrize("config_class", ["BartConfig", "MBartConfig", "PegasusConfig", "MarianConfig"])
def test_a_decoder_that_takes_no_positions_is_refused(config_class, make_checkpoint):
    path = make_checkpoint(config_class, d_model=32, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=64)
    assert "takes no position_ids that count from 0" in refusal(path)


def test_a_decoder_whose_positions_count_from_another_number_is_refused(make_checkpoint):
    assert "takes no position_ids that count from 0" in refusal(make_checkpoint("RobertaConfig", is_decoder=True))
    refused = refusal(make_checkpoint("XLMRobertaConfig", is_decoder=True))
    assert "takes no position_ids that count from 0" in refused


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        transformers.GPTNeoConfig(
            vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
        ),
        transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_knows_no_attention_of_others_is_refused_with_the_reason(config, tmp_path):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "attention interface" in refusal(tmp_path, max_model_len=32)


@pytest.mark.parametrize("config_class", ["StableLmConfig", "NemotronConfig"])
def test_layers_that_do_not_hand_on_the_steps_arguments_are_refused(config_class, make_checkpoint):
    assert "gets none of the arguments" in refusal(make_checkpoint(config_class, head_dim=8))


def test_a_window_that_is_only_in_the_mask_is_refused_where_it_matters(make_checkpoint, open_runner):
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert "sliding_window of 5" in refusal(make_checkpoint("PhimoeConfig", sliding_window=5, **moe))
    assert open_runner(make_checkpoint("PhimoeConfig", sliding_window=128, **moe)).generate([[5, 6, 7]], 2)


def test_the_probe_finds_what_each_layer_needs(make_checkpoint):
    path = make_checkpoint(
        "Gemma2Config", sliding_window=5, query_pre_attn_scalar=4, attn_logit_softcapping=2.0, num_hidden_layers=2
    )
    register_attention()
    network = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION_NAME).eval()
    model = TransformersModel(network)
    assert model.vocab_size == 160
    assert model.layers == (
        LayerSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.5, sliding_window=5, softcap=2.0),
        LayerSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.5, sliding_window=None, softcap=2.0),
    )


def test_longrope_is_served_up_to_the_length_it_was_trained_on(tiny_settings):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    settings = {"rope_parameters": rope, "hidden_size": 64, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(**(tiny_settings | settings))
    assert model_length("phi", config, None) == 64
    with pytest.raises(ModelLoadError, match="longrope"):
        model_length("phi", config, 100)


def test_a_model_without_a_length_needs_one():
    config = transformers.MambaConfig()
    assert model_length("mamba", config, 77) == 77
    with pytest.raises(ModelLoadError, match="set max_model_len"):
        model_length("mamba", config, None)


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, runnerd_torch.plugin; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
