"""Brings up what generations need: the engine's process and the tokenizer, loaded at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from runnerd_service.config import ServerConfig
from runnerd_service.engine.messages import EngineReady
from runnerd_service.engine.setup import resolve
from runnerd_service.errors import ConfigurationError, EngineStartFailed
from runnerd_service.frontend.chat_rendering import ChatRenderer
from runnerd_service.frontend.preparation import Preparer
from runnerd_service.frontend.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from runnerd_service.frontend.types import ModelDescription
from runnerd_service.frontend.validation import ServedModel, capability_map
from runnerd_service.guided.checker import GuideChecker
from runnerd_service.guided.guide import Vocabulary
from runnerd_spi import RunnerCapabilities, RunnerError, load_runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can be generated with."""

    ready: EngineReady
    served: ServedModel
    tokenizer: Tokenizer
    renderer: ChatRenderer
    preparer: Preparer
    vocabulary: Vocabulary | None = None
    """What guides are followed in; None: none is."""
    guides: GuideChecker | None = None

    def describe(self) -> ModelDescription:
        """Describe it for clients."""
        return ModelDescription(
            name=self.served.name,
            architecture=self.ready.architecture,
            vocab_size=self.ready.vocab_size,
            max_model_len=self.ready.max_model_len,
            eos_token_ids=tuple(self.ready.eos_token_ids),
            dtype=self.ready.dtype,
            num_parameters=self.ready.num_parameters,
            weights_bytes=self.ready.weights_bytes,
            has_chat_template=self.renderer.has_template,
            capabilities=capability_map(self.served.capabilities),
            max_logprobs=self.served.max_logprobs,
            max_n=self.served.max_n,
        )


def check_configuration(config: ServerConfig) -> None:
    """Refuse what the runner's capabilities do not allow, before anything is started.

    Raises:
        ConfigurationError: The configuration cannot be served.
        EngineStartFailed: There is no such runner, or it cannot be imported.
    """
    try:
        resolve(config.engine, load_runner(config.engine.runner))
    except RunnerError as error:
        raise EngineStartFailed(type(error).__name__, str(error)) from error


async def load_model(config: ServerConfig, engine_start: Coroutine[Any, Any, EngineReady]) -> LoadedModel:
    """Load the tokenizer while ``engine_start`` brings the engine up.

    Raises:
        ConfigurationError: The runner, the tokenizer or the chat template cannot be used.
        EngineStartFailed: From ``engine_start``.
    """
    engine = asyncio.create_task(engine_start)
    text_side: asyncio.Task[tuple[Tokenizer, ChatRenderer]] | None = None
    try:
        capabilities = _capabilities(config.engine.runner)
        text_side = asyncio.create_task(asyncio.to_thread(_load_text_side, config, capabilities))
        await asyncio.wait((engine, text_side), return_when=asyncio.FIRST_EXCEPTION)
        if engine.done():
            engine.result()  # raises if it failed, perhaps before the other is done
        tokenizer, renderer = await text_side
        ready = await engine
    finally:
        unfinished = [task for task in (engine, text_side) if task is not None and not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
    served = _served_model(config, capabilities, ready)
    vocabulary = guides = None
    if capabilities.guided_decoding != "no" and ready.max_in_flight == 1:
        vocabulary = await asyncio.to_thread(tokenizer.vocabulary, ready.vocab_size)
    if vocabulary is not None:
        guides = GuideChecker(vocabulary, config.guide_timeout_seconds, config.engine.guide_cache_size)
    preparer = Preparer(served, tokenizer, renderer, guides)
    return LoadedModel(ready, served, tokenizer, renderer, preparer, vocabulary, guides)


def _capabilities(runner: str) -> RunnerCapabilities:
    try:
        return load_runner(runner).capabilities
    except RunnerError as error:
        raise ConfigurationError(str(error)) from error


def _load_text_side(config: ServerConfig, capabilities: RunnerCapabilities) -> tuple[Tokenizer, ChatRenderer]:
    if capabilities.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif config.engine.model is None:
        raise ConfigurationError(f"the runner {config.engine.runner!r} needs a model; give --model")
    else:
        tokenizer = load_tokenizer(config.engine.model)
    return tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens, config.chat_template)


def _served_model(config: ServerConfig, capabilities: RunnerCapabilities, ready: EngineReady) -> ServedModel:
    return ServedModel(
        name=config.served_model_name or ready.model_name,
        runner=config.engine.runner,
        capabilities=capabilities,
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        eos_token_ids=tuple(ready.eos_token_ids),
        max_n=config.max_n,
        max_logprobs=min(config.max_logprobs, capabilities.max_logprobs),
        max_stop_strings=config.max_stop_strings,
        max_bad_words=config.max_bad_words,
        request_templates=config.request_templates,
        max_logit_bias=config.max_logit_bias,
        max_in_flight=ready.max_in_flight,
        max_guide_bytes=config.max_guide_bytes,
    )
