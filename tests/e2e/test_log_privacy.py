"""What users send stays out of the log, at every level and whatever becomes of their requests."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import ChatMessage, ChatPrompt, Client, GuidedDecoding, RunnerdError, chat

CANARY = "canary-4711"
LEVELS = ("debug", "info", "warning", "error")
CONVERSATION = {"role": "user", "content": CANARY}

# Served or refused, each for another reason.
REQUESTS = [
    (CANARY, {}),
    (CANARY, {"stop": [CANARY], "bad_words": [CANARY], "include_prompt": True}),
    (CANARY, {"model": CANARY}),
    (CANARY, {"adapter": CANARY}),
    (CANARY, {"cache_salt": CANARY}),
    (CANARY, {"cache_salt": CANARY * 20}),
    (CANARY, {"stop": [CANARY * 200], "bad_words": [CANARY * 200], "top_p": 7.0}),
    (CANARY, {"guided_decoding": GuidedDecoding(regex=f"{CANARY}(((")}),
    (CANARY, {"guided_decoding": GuidedDecoding(json_schema=f'{{"{CANARY}": ')}),
    (CANARY * 2000, {}),
    (chat(CONVERSATION), {}),
    (chat({"role": CANARY, "content": CANARY, "name": CANARY}), {}),
    (ChatPrompt(messages=[ChatMessage(**CONVERSATION)], chat_template=f"{{{{ '{CANARY}' / 0 }}}}"), {}),
    (ChatPrompt(messages=[ChatMessage(**CONVERSATION)], chat_template=f"{{% {CANARY}"), {}),
    (ChatPrompt(messages=[ChatMessage(**CONVERSATION)], chat_template=f"{{{{ raise_exception('{CANARY}') }}}}"), {}),
    (f"{CANARY} FAIL", {}),  # which the runner cannot compute
    (f"{CANARY} CRASH", {}),  # which the engine dies of
]


def test_no_text_of_a_request_is_in_the_log(daemon) -> None:
    options = ("fail_row_token=FAIL", "crash_row_token=CRASH")
    arguments = [one for option in options for one in ("--runner-option", option)]
    server = daemon(*arguments, "--log-level", "debug", "--engine-restart-backoff", "0.01")
    address = server.wait_until_ready()
    codes = set()
    with Client(address, timeout=60, token=CANARY, metadata={"x-canary": CANARY}) as client:
        for prompt, options in REQUESTS:
            try:
                client.generate(prompt, max_tokens=2, **options)
                codes.add(grpc.StatusCode.OK)
            except RunnerdError as error:
                codes.add(error.code)
        with contextlib.suppress(RunnerdError), client.stream(CANARY, max_tokens=500, ignore_eos=True) as stream:
            next(stream)
        client.tokenize(CANARY)
        client.detokenize(list(CANARY.encode()))
        client.abort("none")
    with grpc.insecure_channel(address) as channel:
        # Not UTF-8, and not to be read.
        call = channel.unary_unary("/runnerd.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError):
            call(b"\x12\x0e" + CANARY.encode() + b"\xff\xfe\xff", timeout=60)
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(f"/{CANARY}/{CANARY}")(b"", timeout=60)
        request = GenerateRequest(text=CANARY, request_id="named\n\x1b[31m")
        assert inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60).outputs
    server.terminate()
    assert server.wait() == 0
    log = server.log()
    assert {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INTERNAL,
    } <= codes
    assert r"request named\n\x1b[31m finished" in log
    assert rf"request named\n\x1b[31m: {len(CANARY)} prompt tokens" in log
    assert "\x1b" not in log
    assert "the engine failed" in log
    for level in LEVELS[:3]:
        assert f" {level.upper()} " in log
    assert [line for line in log.splitlines() if "canary" in line.lower()] == []
