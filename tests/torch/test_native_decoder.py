"""The native decoder gives the numbers of transformers, and a token's bits depend on nothing but its own sequence."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runnerd_spi import InvalidOption, ModelLoadError, RunnerConfig, RunnerUnavailable
from runnerd_torch.attention import AttentionMetadata
from runnerd_torch.attention.native_attention import NativePagedAttention
from runnerd_torch.decoder import DecoderBuilder, DecoderLibrary, NativeDecoder
from runnerd_torch.decoder.library import PHASES
from runnerd_torch.decoder.model import reason_against
from runnerd_torch.decoder.packing import pack, taking_turns
from runnerd_torch.decoder.rotations import Rotations
from runnerd_torch.models import ATTENTION_NAME, KVCache, StepAttention, TransformersModel, register_attention
from runnerd_torch.plugin import CPU

NUM_BLOCKS = 64
SIZES = {
    "vocab_size": 101,  # no multiple of a panel
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama of other heads": (
        transformers.LlamaConfig,
        {"head_dim": 24, "num_attention_heads": 4, "tie_word_embeddings": False},
    ),
    "llama of wide heads": (transformers.LlamaConfig, {"head_dim": 96, "attention_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 11}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
}


def make_network(family: str, dtype: torch.dtype = torch.float32, **more: object) -> transformers.PreTrainedModel:
    config_class, own = FAMILIES[family]
    config = config_class(**SIZES | own | more, attn_implementation=ATTENTION_NAME)
    register_attention()
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    for name, parameter in network.named_parameters():
        # Norms of 1 and biases of 0 would hide whether they are there.
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return network.to(dtype).eval().requires_grad_(False)


@dataclass
class Sequences:
    """Sequences over one paged cache; a step computes the next tokens of some of them."""

    model: TransformersModel | NativeDecoder
    tokens: list[list[int]]
    dtype: torch.dtype
    table_offset: int = 0
    """Added to the blocks that attention is told of."""
    block_size: int = 16

    def __post_init__(self) -> None:
        def cache(layer):
            shape = (NUM_BLOCKS, self.block_size, layer.num_kv_heads, layer.head_dim)
            return torch.full(shape, torch.nan, dtype=self.dtype)

        self.caches = tuple(KVCache(cache(layer), cache(layer)) for layer in self.model.layers)
        self.num_blocks = NUM_BLOCKS // len(self.tokens)
        self.computed = [0] * len(self.tokens)

    def step(self, rows: dict[int, int], wanted: list[int] | None = None) -> torch.Tensor:
        """Give the logits of the next so many tokens of each sequence, or of those wanted among them."""
        counts, lens = list(rows.values()), []
        input_ids, positions, slots = [], [], []
        for row, count in rows.items():
            begin = self.computed[row]
            input_ids += self.tokens[row][begin : begin + count]
            positions += range(begin, begin + count)
            slots += [row * self.num_blocks * self.block_size + position for position in range(begin, begin + count)]
            self.computed[row] += count
            lens.append(begin + count)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        first_blocks = [row * self.num_blocks + self.table_offset for row in rows]
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [list(range(first, first + self.num_blocks)) for first in first_blocks], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            query_start_loc_cpu=starts,
            seq_lens_cpu=np.array(lens, np.int32),
            num_rows=len(rows),
            max_query_len=max(counts),
            max_seq_len=max(lens),
            block_size=self.block_size,
        )
        attention = StepAttention(NativePagedAttention(), self.caches, metadata)
        with torch.inference_mode():
            logits_index = torch.tensor(range(len(input_ids)) if wanted is None else wanted)
            return self.model.forward(torch.tensor(input_ids), torch.tensor(positions), logits_index, attention).clone()


@pytest.fixture(scope="module")
def library() -> DecoderLibrary:
    return DecoderLibrary()


def native(library: DecoderLibrary, network: transformers.PreTrainedModel, quantization="none") -> NativeDecoder:
    probed = TransformersModel(network)
    assert reason_against(network, probed, quantization) is None
    return NativeDecoder(network, probed, library, quantization)


def some_tokens(*lengths: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=numbers).tolist() for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(library, family):
    tokens = some_tokens(37, 5, 70)
    expected = Sequences(TransformersModel(make_network(family)), tokens, torch.float32)
    got = Sequences(native(library, make_network(family)), tokens, torch.float32)
    for rows in ({0: 37, 1: 4, 2: 33}, {1: 1, 2: 37}):
        torch.testing.assert_close(got.step(rows), expected.step(rows), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(library, family):
    rounded = make_network(family, torch.bfloat16).float()
    tokens = some_tokens(120, 20)
    exact = Sequences(TransformersModel(rounded), tokens, torch.float32).step({0: 120, 1: 20})
    theirs = Sequences(TransformersModel(make_network(family, torch.bfloat16)), tokens, torch.bfloat16)
    their_error = (theirs.step({0: 120, 1: 20}).float() - exact).square().mean().sqrt()
    decoder = native(library, make_network(family, torch.bfloat16))
    # Blocks of whole pages are laid out in the cache as products take them.
    for block_size in (8, 16, 32):
        ours = Sequences(decoder, tokens, torch.bfloat16, block_size=block_size)
        our_error = (ours.step({0: 120, 1: 20}) - exact).square().mean().sqrt()
        assert our_error < 1.2 * their_error


def rounded_to_int8(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


def rounded_to_int4(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.view(len(weight), -1, 32)
    least = groups.amin(2, keepdim=True)
    steps = ((groups.amax(2, keepdim=True) - least) / 15).half().float()
    least = least.half().float()
    return (((groups - least) / steps).round().clamp(0, 15) * steps + least).view(weight.shape)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.6), ("int4", 0.48)])
def test_quantized_weights_give_the_logits_of_their_rounded_numbers(library, family, quantization, share):
    def rounded(network):
        weights = [(name, parameter) for name, parameter in network.named_parameters() if parameter.dim() == 2]
        for name, parameter in weights:
            if "proj" in name and quantization == "int4":
                parameter.copy_(rounded_to_int4(parameter))
            elif "proj" in name or "lm_head" in name or ("embed" in name and network.config.tie_word_embeddings):
                parameter.copy_(rounded_to_int8(parameter))
        return network

    tokens = some_tokens(40, 9)
    network = make_network(family, torch.bfloat16).float()
    exact = Sequences(TransformersModel(rounded(network)), tokens, torch.float32).step({0: 40, 1: 9})
    decoder = native(library, make_network(family, torch.bfloat16), quantization)
    got = Sequences(decoder, tokens, torch.bfloat16).step({0: 40, 1: 9})
    error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.03
    assert decoder.weights_bytes < share * native(library, make_network(family, torch.bfloat16)).weights_bytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_vanish(library, quantization, odd):
    network = make_network("llama", torch.bfloat16, tie_word_embeddings=False)
    network.model.embed_tokens.weight[7, 3] = odd
    decoder = native(library, network, quantization)
    logits = Sequences(decoder, [[1, 2, 3], [1, 7, 3]], torch.bfloat16).step({0: 3, 1: 3})
    assert logits[:3].isfinite().all()
    assert logits[4:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")],
)
@pytest.mark.parametrize(("family", "block_size"), [("llama", 16), ("mistral", 32), ("mistral", 8)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_token_has_the_same_bits_in_every_batch_and_chunk(
    library, dtype, quantization, family, block_size, num_threads
):
    tokens = some_tokens(110, 18, 33)
    decoder = native(library, make_network(family, dtype), quantization)
    alone = [Sequences(decoder, [row], dtype, block_size=block_size).step({0: len(row)}) for row in tokens]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = Sequences(decoder, tokens, dtype, block_size=block_size)
        got: list[list[torch.Tensor]] = [[], [], []]
        for rows in ({0: 1, 1: 17}, {0: 60, 2: 32}, {0: 1, 1: 1, 2: 1}, {0: 40}, *({0: 1},) * 8):
            parts = together.step(rows).split(list(rows.values()))
            for row, part in zip(rows, parts, strict=True):
                got[row].append(part)
    finally:
        torch.set_num_threads(before)
    for row, parts in enumerate(got):
        assert torch.equal(torch.cat(parts), alone[row])


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("mistral", torch.bfloat16)])
@pytest.mark.parametrize("wanted", [[36], [0], [69, 2, 40], [40, 41, 42, 36, 109], [110]])
def test_a_token_has_the_same_bits_whichever_logits_are_wanted(library, family, dtype, wanted):
    tokens = some_tokens(47, 4, 71)
    decoder = native(library, make_network(family, dtype))
    every, some = (Sequences(decoder, tokens, dtype) for _ in range(2))
    begin, then = {0: 10, 2: 1}, {0: 37, 1: 4, 2: 70}
    assert torch.equal(some.step(begin, wanted=[10]), every.step(begin)[[10]])
    assert torch.equal(some.step(then, wanted), every.step(then)[wanted])


@settings(max_examples=40, deadline=None)
@given(num_outputs=st.integers(1, 70), num_inputs=st.sampled_from([32, 64, 96]), seed=st.integers(0, 9))
def test_a_packed_weight_holds_the_weight(num_outputs, num_inputs, seed):
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))
    for dtype, part in ((torch.float32, 1), (torch.bfloat16, 2)):
        packed = pack(weight.to(dtype), None, "none")
        rows = packed.values.view(-1, num_inputs // part, 16, part).transpose(1, 2).reshape(-1, num_inputs)
        assert torch.equal(rows[:num_outputs], weight.to(dtype))
        assert not rows[num_outputs:].any()


def test_gates_and_ups_take_turns_by_panels():
    gate, up = torch.arange(64.0).view(32, 2), torch.arange(64.0, 128.0).view(32, 2)
    joined = taking_turns(gate, up)
    assert torch.equal(joined[:16], gate[:16])
    assert torch.equal(joined[16:32], up[:16])
    assert torch.equal(joined[32:48], gate[16:])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 300),
    num_rows=st.sampled_from([1, 5, 4000]),
    highest=st.integers(1, 40),
    odd=st.sampled_from([None, -torch.inf, torch.inf, torch.nan]),
    seed=st.integers(0, 99),
)
def test_greedy_choices_are_those_of_torch(size, num_rows, highest, odd, seed):
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randint(-highest, highest + 1, (num_rows, size), generator=numbers).float()
    if odd is not None:
        logits[torch.rand(logits.shape, generator=numbers) < (0.99 if odd == -torch.inf else 0.01)] = odd
    # For lack of a fixture within hypothesis: the library comes from the cache.
    chosen = logits.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    status = torch.where(chosen == -torch.inf, 1, torch.where(chosen.isfinite(), 0, 2))
    assert torch.equal(DecoderLibrary().choose(logits), torch.stack((logits.argmax(1), status)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_phases_of_a_step_are_measured_when_asked_for(library, family):
    decoder = native(library, make_network(family))
    decoder.phase_ns = torch.zeros(len(PHASES), dtype=torch.int64)
    Sequences(decoder, some_tokens(20), torch.float32).step({0: 20})
    measured = dict(zip(PHASES, decoder.phase_ns.tolist(), strict=True))
    # Heads without norms are rotated as soon as they are multiplied.
    assert [phase for phase, ns in measured.items() if not ns] == (["rotate"] if family == "llama" else [])


def test_slots_and_blocks_outside_the_cache_are_refused(library):
    decoder = native(library, make_network("llama"))
    with pytest.raises(IndexError, match="block_tables hold a block outside"):
        Sequences(decoder, some_tokens(20), torch.float32, table_offset=NUM_BLOCKS).step({0: 20})
    sequences = Sequences(decoder, some_tokens(4, 4), torch.float32)
    sequences.num_blocks = NUM_BLOCKS
    with pytest.raises(IndexError, match="slot_mapping holds a slot outside"):
        sequences.step({1: 4})


@pytest.mark.parametrize(
    ("family", "changes", "quantization", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "none", "its activation is not SiLU"),
        ("llama", {"mlp_bias": True}, "none", "its MLP has biases"),
        ("llama", {"intermediate_size": 40}, "none", "no multiple of 32"),
        ("llama", {"intermediate_size": 96}, "int8", "no multiple of 64"),
    ],
)
def test_what_it_does_not_serve_is_named(library, family, changes, quantization, reason):
    network = make_network(family, torch.bfloat16, **changes)
    assert reason in reason_against(network, TransformersModel(network), quantization)
    needed = DecoderBuilder(quantization, required=True)
    needed.prepare()
    with pytest.raises(ModelLoadError, match="the native decoder does not serve this LlamaForCausalLM"):
        needed.build("m", network, TransformersModel(network))
    if quantization == "none":
        wanted = DecoderBuilder(quantization, required=False)
        wanted.prepare()
        assert wanted.build("m", network, TransformersModel(network)) is None


def test_without_a_compiler_it_is_left_out_or_refused(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    DecoderBuilder("none", required=False).prepare()
    assert "the native decoder cannot be used, falling back to torch" in caplog.text
    with pytest.raises(RunnerUnavailable, match="choose model_impl fused and quantization none"):
        DecoderBuilder("int8", required=False).prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int2"}, "option quantization is 'int2', expected none, int8, int4"),
        ({"quantization": "int4", "linear": "torch"}, "option quantization int4 needs the native decoder"),
        ({"quantization": "int8", "attention": "torch"}, "option quantization int8 needs the native decoder"),
        ({"model_impl": "native", "linear": "torch"}, "option model_impl native needs the native decoder"),
        ({"quantization": "int8", "model_impl": "fused"}, "which model_impl fused leaves out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    config = RunnerConfig(
        model="m",
        dtype="auto",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_in_flight=1,
        block_size=8,
        options=options,
    )
    with pytest.raises(InvalidOption, match=message):
        CPU.create(config)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86 compilers")
@pytest.mark.parametrize("left_out", ["amx-tile amx-bf16 amx-int8", "amx-tile avx512bf16", "amx-tile avx512f", "avx"])
def test_processors_that_can_less_compute_the_same(monkeypatch, left_out):
    flags = " ".join(f"-mno-{name}" for name in left_out.split())
    monkeypatch.setenv("CXX", f"c++ {flags}")
    library = DecoderLibrary()
    for family in FAMILIES:
        test_logits_are_those_of_transformers(library, family)
        test_bfloat16_is_as_near_to_float32_as_transformers_is(library, family)
    for quantization, share in (("int8", 0.6), ("int4", 0.48)):
        test_quantized_weights_give_the_logits_of_their_rounded_numbers(library, "qwen2", quantization, share)
    for dtype, quantization in (
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "int4"),
    ):
        test_a_token_has_the_same_bits_in_every_batch_and_chunk(library, dtype, quantization, "mistral", 16, 2)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_positions_are_turned_as_the_model_turns_them(scaling):
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **scaling})
    theirs, rotations = LlamaRotaryEmbedding(config), Rotations(LlamaRotaryEmbedding(config))
    for positions in ([0, 1, 2], [5], [40, 7, 100], [3, 127]):
        end = max(positions) + 1
        for expected, got in zip(
            theirs(torch.empty(0), torch.tensor([positions])), rotations.at(torch.tensor(positions), end), strict=True
        ):
            assert torch.equal(got, expected[0])
