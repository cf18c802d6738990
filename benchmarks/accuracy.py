"""What a data type or a quantisation costs in accuracy: perplexity of a text, and agreement with float32.

Each configuration is served by a daemon of its own and asked over gRPC. The text is Python's reference, as the
interpreter brings it: prose and code. Pieces of it, spread evenly, are computed as prompts:

- perplexity: exp of the mean negative log-probability of all tokens of the pieces but each one's first;
- agreement: at how many positions the most likely token is that of float32, the history being the same;
- logprob difference: the mean of how far the log-probability of a position's token is from float32's.

Then each piece's beginning is continued greedily: how many continuations are float32's to the end, and how many tokens
are the same before the first that differs. Time is not measured: other load on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pydoc_data.topics import topics
from typing import Any

import grpc
from common import daemon, machine, save, table

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

REFERENCE = "float32"
TIMEOUT_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Answers:
    """What one configuration said."""

    # [num_pieces][piece_len - 1]
    logprobs: list[list[float]]
    # [num_pieces][piece_len - 1]: the most likely token of each position
    choices: list[list[int]]
    # [num_pieces][output_len]
    continuations: list[list[int]]


def text() -> str:
    """Give the text, the same one for each run on one Python."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def pieces_of(token_ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Cut ``count`` pieces of ``length`` tokens out, spread evenly."""
    if count * length > len(token_ids):
        raise SystemExit(f"the text has {len(token_ids)} tokens: not {count} pieces of {length}")
    stride = len(token_ids) // count
    return [list(token_ids[first : first + length]) for first in range(0, stride * count, stride)]


def ask(address: str, arguments: argparse.Namespace) -> Answers:
    """Compute all pieces and continuations on a daemon."""
    limit = ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)
    with grpc.insecure_channel(address, options=limit) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.TokenizeRequest(text=text(), add_special_tokens=False)
        ids = stub.Tokenize(request, timeout=TIMEOUT_SECONDS).ids
        pieces = pieces_of(ids, arguments.pieces, arguments.piece_len)

        def generate(prompts: list[list[int]], num_tokens: int, output: generation_pb2.OutputOptions) -> list[Any]:
            calls = [
                stub.Generate.future(
                    generation_pb2.GenerateRequest(
                        token_ids=generation_pb2.TokenIds(ids=prompt),
                        sampling=generation_pb2.SamplingParams(temperature=0),
                        stopping=generation_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
                        output=output,
                    ),
                    timeout=TIMEOUT_SECONDS,
                )
                for prompt in prompts
            ]
            return [call.result() for call in calls]

        scored = generate(pieces, 1, generation_pb2.OutputOptions(text=False, prompt_logprobs=1))
        begins = [piece[: arguments.prompt_len] for piece in pieces]
        continued = generate(begins, arguments.output_len, generation_pb2.OutputOptions(text=False, tokens=True))
    return Answers(
        [[token.logprob for token in one.prompt_tokens] for one in scored],
        [[token.candidates[0].id for token in one.prompt_tokens] for one in scored],
        [[token.id for token in one.outputs[0].tokens] for one in continued],
    )


def compare(answers: Answers, reference: Answers) -> dict[str, Any]:
    """Turn what a configuration said into figures, beside what float32 said."""
    logprobs, expected = (list(chain.from_iterable(one.logprobs)) for one in (answers, reference))
    choices, chosen = (list(chain.from_iterable(one.choices)) for one in (answers, reference))
    same = [
        next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        for mine, theirs in zip(answers.continuations, reference.continuations, strict=True)
    ]
    perplexity, base = (math.exp(-statistics.fmean(one)) for one in (logprobs, expected))
    return {
        "tokens": len(logprobs),
        "perplexity": perplexity,
        "perplexity_change_percent": 100 * (perplexity / base - 1),
        "agreement_percent": 100 * statistics.fmean(a == b for a, b in zip(choices, chosen, strict=True)),
        "mean_logprob_difference": statistics.fmean(abs(a - b) for a, b in zip(logprobs, expected, strict=True)),
        "continuations": len(same),
        "equal_continuations": sum(
            mine == theirs for mine, theirs in zip(answers.continuations, reference.continuations, strict=True)
        ),
        "mean_tokens_before_difference": statistics.fmean(same),
    }


DEFAULT_VARIANTS = (
    "bfloat16=--dtype bfloat16",
    *(f"{name}=--dtype bfloat16 --runner-option quantization={name}" for name in ("int8", "int4")),
)


def variant(given: str) -> tuple[str, list[str]]:
    """Read ``NAME=ARGUMENTS``.

    Raises:
        argparse.ArgumentTypeError: It is not of that form.
    """
    name, separator, arguments = given.partition("=")
    if not (name and separator and arguments) or name == REFERENCE:
        raise argparse.ArgumentTypeError(
            f"{given!r}: give NAME=ARGUMENTS of runnerd serve; {REFERENCE} is there anyway"
        )
    return name, shlex.split(arguments)


def rows_of(figures: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Lay the figures out, one row per configuration."""
    return [
        [
            name,
            f"{one['perplexity']:.3f}",
            f"{one['perplexity_change_percent']:+.2f}",
            f"{one['agreement_percent']:.2f}",
            f"{one['mean_logprob_difference']:.4f}",
            f"{one['equal_continuations']} of {one['continuations']}",
            one["mean_tokens_before_difference"],
        ]
        for name, one in figures.items()
    ]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory or GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--variant",
        type=variant,
        action="append",
        metavar="NAME=ARGUMENTS",
        help="a configuration, by its arguments of runnerd serve (default: bfloat16, int8 and int4)",
    )
    parser.add_argument("--pieces", type=int, default=16)
    parser.add_argument("--piece-len", type=int, default=256, help="tokens of a piece")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of a piece's beginning that is continued")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--serve-argument", action="append", default=[], help="argument of runnerd serve for all")
    return parser.parse_args()


def main() -> None:
    """Run, save the figures, print a table."""
    arguments = parse()
    before = machine()
    common = [*([arguments.model] if arguments.model else []), "--no-prefix-caching", *arguments.serve_argument]
    variants = {REFERENCE: ["--dtype", "float32"], **dict(arguments.variant or map(variant, DEFAULT_VARIANTS))}
    answers: dict[str, Answers] = {}
    for name, serve in variants.items():
        with daemon(*common, *serve) as server:
            answers[name] = ask(server.address, arguments)
    figures = {name: compare(one, answers[REFERENCE]) for name, one in answers.items()}
    result = {
        "machine": before,
        "arguments": vars(arguments),
        "text_sha256": hashlib.sha256(text().encode()).hexdigest(),
        "variants": {name: {"serve": variants[name], **one} for name, one in figures.items()},
    }
    print(json.dumps(result, indent=1))
    header = ["variant", "perplexity", "change %", "agreement %", "logprob difference", "equal answers", "equal tokens"]
    print(table(header, rows_of(figures)))
    print(f"written to {save('accuracy', result)}")


if __name__ == "__main__":
    main()
