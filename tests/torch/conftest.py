"""Real runners on tiny checkpoints, driven by plans that a small scheduler of the tests' own builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from runnerd_spi import (
    Admit,
    BlockGrant,
    ModelRunner,
    OptionValue,
    Release,
    Row,
    RowOutput,
    RunnerConfig,
    SamplingParams,
    StepHandle,
    StepPlan,
)
from runnerd_torch.gguf_reading import quick_gguf_reading
from runnerd_torch.plugin import CPU


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tiny tensors gain nothing from a second thread, and lose much where others use the cores.
    torch.set_num_threads(1)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Request:
    """A request as the driver knows it; counts only, as a scheduler ahead of its device has no tokens."""

    prompt: list[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    shared_blocks: list[int] = field(default_factory=list)
    """Blocks whose tokens are computed already, for the front of the prompt."""
    slot: int = -1
    epoch: int = -1
    num_tokens: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    outputs: list[RowOutput] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [output.token_id for output in self.outputs]


class Driver:
    """Runs requests on a warmed-up runner: whole plans, one after the other, resolved as late as the depth allows."""

    def __init__(self, runner: ModelRunner, config: RunnerConfig, num_blocks: int) -> None:
        self.runner = runner
        self.config = config
        self.step_id = 0
        self._epoch = 0
        self._free_slots = list(range(config.max_num_seqs))
        self._free_blocks = list(range(num_blocks))
        self._releases: list[Release] = []
        self._admits: list[Admit] = []

    def admit(self, request: Request) -> None:
        """Put a request into a slot, with the outputs it has."""
        tokens = tuple(request.prompt + request.token_ids)
        request.slot = self._free_slots.pop(0)
        request.epoch = self._epoch
        self._epoch += 1
        request.num_tokens = len(tokens)
        request.num_computed = len(request.shared_blocks) * self.config.block_size
        request.blocks = []
        self._admits.append(Admit(request.slot, request.epoch, tokens, len(request.prompt), request.params))

    def release(self, request: Request, *, keep_blocks: bool = False) -> None:
        """Take a request out of its slot."""
        self._releases.append(Release(request.slot, request.epoch))
        self._free_slots.append(request.slot)
        if not keep_blocks:
            self._free_blocks += [block for block in request.blocks if block not in request.shared_blocks]

    def step(self, requests: list[Request], chunk: int = 1 << 30) -> tuple[StepHandle, list[Request]]:
        """Launch one step that computes up to ``chunk`` tokens of each request."""
        rows, grants, budget = [], [], self.config.max_num_batched_tokens
        computing: list[Request] = []
        for request in requests:
            count = min(chunk, request.num_tokens - request.num_computed, budget)
            if count <= 0:
                continue
            budget -= count
            first, end = request.num_computed, request.num_computed + count
            if fresh := self._take_blocks(request, end):
                grants.append(BlockGrant(request.slot, request.epoch, tuple(fresh)))
            sample = end == request.num_tokens
            rows.append(Row(request.slot, request.epoch, count, first, sample))
            request.num_computed = end
            request.num_tokens += sample
            computing.append(request)
        return self.launch(tuple(grants), tuple(rows)), computing

    def launch(self, grants: tuple[BlockGrant, ...] = (), rows: tuple[Row, ...] = ()) -> StepHandle:
        """Launch a plan with what was admitted and released before."""
        plan = StepPlan(self.step_id, tuple(self._releases), tuple(self._admits), grants, rows)
        handle = self.runner.execute_model(plan)
        self.step_id += 1
        self._releases, self._admits = [], []
        return handle

    def run(self, requests: list[Request], chunk: int = 1 << 30) -> list[list[int]]:
        """Run admitted requests to their ``max_tokens`` and give their tokens."""
        launched: list[tuple[StepHandle, list[Request], tuple[Row, ...]]] = []
        while unfinished := [one for one in requests if one.num_tokens < len(one.prompt) + one.max_tokens]:
            launched.append(self.step(unfinished, chunk))
        for handle, computing in launched:
            self.take(handle, computing)
        return [request.token_ids for request in requests]

    def take(self, handle: StepHandle, computing: list[Request]) -> None:
        """Give a step's outputs to its requests."""
        for request, output in zip(computing, handle.result(60).rows, strict=True):
            request.prompt_logprobs += output.prompt_logprobs
            if output.token_id is not None or output.failure is not None:
                request.outputs.append(output)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        chunk: int = 1 << 30,
        params: SamplingParams = GREEDY,
    ) -> list[list[int]]:
        """Run prompts as one batch from admission to release."""
        requests = [Request(prompt, max_tokens, params) for prompt in prompts]
        for request in requests:
            self.admit(request)
        tokens = self.run(requests, chunk)
        for request in requests:
            self.release(request)
        self.launch().result(60)
        return tokens

    def _take_blocks(self, request: Request, end: int) -> list[int]:
        fresh = list(request.shared_blocks) if not request.blocks else []
        while (len(request.blocks) + len(fresh)) * self.config.block_size < end:
            fresh.append(self._free_blocks.pop(0))
        request.blocks += fresh
        return fresh


OpenRunner = Callable[..., Driver]


def _open(model: Path, num_blocks: int, options: dict[str, OptionValue], **settings: object) -> Driver:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 4, "dtype": "float32"}
    config = RunnerConfig(model=str(model), options={"num_threads": 1} | options, **(defaults | settings))
    runner = CPU.create(config)
    runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(num_blocks)
    runner.warm_up()
    return Driver(runner, config, num_blocks)


@pytest.fixture
def open_runner() -> Iterator[OpenRunner]:
    """Give a function that opens a runner on a checkpoint: ``open_runner(path, num_blocks=..., **config)``."""
    opened: list[Driver] = []

    def open_(
        model: Path, num_blocks: int = 128, options: dict[str, OptionValue] | None = None, **more: object
    ) -> Driver:
        opened.append(_open(model, num_blocks, options or {}, **more))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.runner.close()


@pytest.fixture(scope="session")
def smollm2(demo_gguf: Path) -> Iterator[Driver]:
    """A runner with SmolLM2, two steps in flight; shared, so leave no request behind."""
    driver = _open(demo_gguf, 512, {}, max_in_flight=2, max_model_len=512)
    yield driver
    driver.runner.close()


@pytest.fixture(scope="session")
def smollm2_oracle(demo_gguf: Path) -> transformers.PreTrainedModel:
    """The same model as transformers runs it."""
    with quick_gguf_reading(lambda items, **_: items):
        return transformers.AutoModelForCausalLM.from_pretrained(
            demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="session")
def request_type() -> type[Request]:
    return Request


_TINY = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that the highest logit stands out of rounding.
    "initializer_range": 0.3,
}


@pytest.fixture(scope="session")
def tiny_settings() -> dict[str, object]:
    return dict(_TINY)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give a function that writes a random model of a config class, the same one each time."""

    def make(config_class: str, **settings: object) -> Path:
        path = tmp_path_factory.mktemp(config_class)
        config = getattr(transformers, config_class)(**(_TINY | settings))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # Biases of 0 and norms of 1 would hide that one of them was forgotten.
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """Give what transformers generates greedily for one prompt, ends of text included."""

    def run(model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=0,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    return run
