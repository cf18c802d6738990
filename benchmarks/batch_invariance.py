"""How much the batch around a request changes its answer, by data type: greedy, alone and among others.

Each request runs alone and in one batch with all the others. As long as both ways have chosen the same tokens, the next
choice and its log-probabilities have the same history; so those positions are compared, up to the first that differs.
Time is not measured: other load on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import embedded_model
from common import machine, save, table

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine
from runnerd_service.engine.messages import AddRequest, Logprobs, Sampling
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.frontend.tokenizer import load_tokenizer
from runnerd_spi import load_runner

TEXT = Path(__file__).parents[1] / "README.md"


@dataclass
class Answer:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


@contextmanager
def engine(model: str, runner: str, dtype: str, options: dict[str, str], num_requests: int) -> Iterator[Engine]:
    """Bring up a synchronous engine that finds no prompt cached."""
    plugin = load_runner(runner)
    config = EngineConfig(
        runner=runner,
        model=model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=num_requests,
        max_num_batched_tokens=4096,
        prefix_caching=False,
        async_execution="off",
        runner_options=options,
    )
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    try:
        yield started.engine
    finally:
        started.runner.close()


def requests(model: str, num_requests: int, num_tokens: int) -> list[AddRequest]:
    """Give prompts of 8 to 64 tokens: pieces of a text, the same ones each time."""
    dice = random.Random(11)
    ids = load_tokenizer(model).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    sampling = Sampling(temperature=0.0, num_logprobs=1)
    batch = []
    for uid in range(num_requests):
        first, length = dice.randrange(len(ids) - 64), dice.randint(8, 64)
        batch.append(AddRequest(uid, tuple(ids[first : first + length]), sampling, num_tokens))
    return batch


def run(one: Engine, batch: Sequence[AddRequest]) -> dict[int, Answer]:
    """Run requests together, to their end."""
    answers = {request.uid: Answer() for request in batch}
    for request in batch:
        one.add(request)
    while one.has_work:
        for output in one.step():
            answers[output.uid].token_ids += output.token_ids
            answers[output.uid].logprobs += output.logprobs
    return answers


def compare(alone: dict[int, Answer], together: dict[int, Answer]) -> dict[str, Any]:
    """Compare what both ways gave, position by position while their histories are the same."""
    compared = differ = whole = 0
    most = total = 0.0
    for uid, first in alone.items():
        second = together[uid]
        whole += first.token_ids == second.token_ids
        for mine, other in zip(first.logprobs, second.logprobs, strict=True):
            compared += 1
            change = abs(mine.top[0][1] - other.top[0][1])
            most, total = max(most, change), total + change
            if mine.token_id != other.token_id:
                differ += 1
                break
    return {
        "requests": len(alone),
        "requests_with_equal_answers": whole,
        "tokens_compared": compared,
        "tokens_that_differ_percent": 100 * differ / compared,
        "max_logprob_difference": most,
        "mean_logprob_difference": total / compared,
    }


def main() -> None:
    """Run, save the figures, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--runner", default="cpu")
    parser.add_argument("--runner-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    model = arguments.model or embedded_model()
    options = dict(one.split("=", 1) for one in arguments.runner_option)
    result: dict[str, Any] = {"machine": machine(), "arguments": vars(arguments), "dtypes": {}}
    for dtype in arguments.dtypes:
        with engine(model, arguments.runner, dtype, options, arguments.batch) as one:
            batch = requests(model, arguments.batch, arguments.tokens)
            alone = {uid: answer for request in batch for uid, answer in run(one, [request]).items()}
            result["dtypes"][dtype] = compare(alone, run(one, batch))
    save("batch_invariance", result)
    print(json.dumps(result["dtypes"]))
    header = ["dtype", "equal answers", "tokens compared", "differ %", "max logprob difference", "mean"]
    rows = [
        [
            dtype,
            f"{one['requests_with_equal_answers']} of {one['requests']}",
            str(one["tokens_compared"]),
            f"{one['tokens_that_differ_percent']:.2f}",
            f"{one['max_logprob_difference']:.2g}",
            f"{one['mean_logprob_difference']:.2g}",
        ]
        for dtype, one in result["dtypes"].items()
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
