"""Writes the front end's types as protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration

from runnerd.v1 import generation_pb2, inference_pb2, server_pb2
from runnerd_service.engine.messages import Load
from runnerd_service.frontend.types import (
    Event,
    Finish,
    ModelDescription,
    OutputChunk,
    PromptRecords,
    ServerState,
    Started,
    Tokenized,
    TokenRecord,
)
from runnerd_service.rpc.runners import RunnerDescription

_FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
    "time_limit": generation_pb2.FINISH_REASON_TIME_LIMIT,
    "guide": generation_pb2.FINISH_REASON_GUIDE,
}
_SUPPORT = {
    "no": server_pb2.SUPPORT_NO,
    "host_sync": server_pb2.SUPPORT_HOST_SYNC,
    "device": server_pb2.SUPPORT_DEVICE,
}
_PIECE_TOKENS = 10_000
_STATES: Mapping[ServerState, server_pb2.ServerState.ValueType] = {
    "loading": server_pb2.SERVER_STATE_LOADING,
    "serving": server_pb2.SERVER_STATE_SERVING,
    "recovering": server_pb2.SERVER_STATE_RECOVERING,
    "draining": server_pb2.SERVER_STATE_DRAINING,
    "failed": server_pb2.SERVER_STATE_FAILED,
}


class Collector:
    """Gathers the delta events of a generation into the answer of the unary call.

    Outputs are made as they are heard of: the number that a request asks for is not checked when this is made.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, inference_pb2.Output] = {}
        self._texts: dict[int, list[str]] = {}
        self._response = inference_pb2.GenerateResponse()

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case OutputChunk():
                if event.index not in self._outputs:
                    self._outputs[event.index] = inference_pb2.Output(index=event.index)
                    self._texts[event.index] = []
                output = self._outputs[event.index]
                self._texts[event.index].append(event.text)
                output.tokens.extend(token(record) for record in event.tokens)
                if event.finish is not None:
                    output.finish.CopyFrom(finish(event.finish))
            case Started():
                self._response.request_id = event.request_id
                self._response.seed = event.seed
            case PromptRecords():
                self._response.prompt_tokens.extend(token(record) for record in event.tokens)

    def response(self) -> inference_pb2.GenerateResponse:
        """Give the whole answer; call once, after the last event."""
        for index in sorted(self._outputs):
            self._outputs[index].text = "".join(self._texts[index])
            self._response.outputs.append(self._outputs[index])
        return self._response


def tokens(tokenized: Tokenized) -> inference_pb2.TokenizeResponse:
    """Give the tokens of a prompt; in pieces, between which other threads have their turn."""
    response = inference_pb2.TokenizeResponse(max_model_len=tokenized.max_model_len)
    for begin in range(0, len(tokenized.ids), _PIECE_TOKENS):
        response.ids.extend(tokenized.ids[begin : begin + _PIECE_TOKENS])
        response.tokens.extend(tokenized.tokens[begin : begin + _PIECE_TOKENS])
    return response


def finish(end: Finish) -> generation_pb2.Finish:
    """Give the message of how an output ended."""
    message = generation_pb2.Finish(
        reason=_FINISH_REASONS[end.reason],
        usage=generation_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
        ),
    )
    if end.eos_token_id is not None:
        message.eos_token_id = end.eos_token_id
    if end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    if end.stop_string is not None:
        message.stop_string = end.stop_string
    return message


def model_info(model: ModelDescription) -> server_pb2.GetModelInfoResponse:
    """Give the description of the served model."""
    return server_pb2.GetModelInfoResponse(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        num_parameters=model.num_parameters,
        weights_bytes=model.weights_bytes,
        has_chat_template=model.has_chat_template,
        capabilities=support(model.capabilities),
        max_logprobs=model.max_logprobs,
        max_n=model.max_n,
    )


def load_info(load: Load) -> server_pb2.GetLoadResponse:
    """Give the engine's counters."""
    return server_pb2.GetLoadResponse(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_used_blocks=load.num_used_blocks,
        num_blocks=load.num_blocks,
        kv_cache_usage=load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0,
        num_steps=load.num_steps,
        num_preemptions=load.num_preemptions,
        prefix_cache_queries=load.prefix_cache_queries,
        prefix_cache_hits=load.prefix_cache_hits,
        prompt_tokens=load.prompt_tokens,
        generation_tokens=load.generation_tokens,
    )


def support(capabilities: Mapping[str, str]) -> dict[str, server_pb2.Support.ValueType]:
    """Give capabilities ("device", "host_sync", "no") as the wire names them."""
    return {name: _SUPPORT[value] for name, value in capabilities.items()}


def runner_info(runner: RunnerDescription) -> server_pb2.RunnerInfo:
    """Give the description of an installed runner."""
    return server_pb2.RunnerInfo(
        name=runner.name,
        description=runner.description,
        distribution=runner.distribution,
        version=runner.version,
        available=not runner.unavailable_reason,
        unavailable_reason=runner.unavailable_reason,
        capabilities=support(runner.capabilities),
        options=[
            server_pb2.RunnerOptionInfo(name=one.name, type=one.type, default_value=one.default, help=one.help)
            for one in runner.options
        ],
        max_in_flight=runner.max_in_flight,
    )


def server_state(state: ServerState) -> server_pb2.ServerState.ValueType:
    """Give the state as the wire names it."""
    return _STATES[state]


def duration(seconds: float) -> Duration:
    """Give a protobuf duration."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def token(record: TokenRecord) -> generation_pb2.Token:
    """Give the message of a token's record."""
    return generation_pb2.Token(
        id=record.id,
        text=record.text,
        logprob=record.logprob,
        rank=record.rank,
        candidates=[
            generation_pb2.TokenCandidate(id=one.id, text=one.text, logprob=one.logprob) for one in record.candidates
        ],
    )
