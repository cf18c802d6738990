"""The flags of ``runnerd bench``, named as the field's serving benchmarks name them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

from runnerd_bench import plot
from runnerd_bench.dataset import BenchRequest, DatasetError, RandomDataset, pick, read_jsonl
from runnerd_bench.metrics import METRICS
from runnerd_service.cli import values
from runnerd_service.cli.connection import add_connection

WARMUP_TOKENS = 32
"""Most output tokens of a warm-up: the first ones bring up all that is slow once."""

EPILOG = """\
examples:
  runnerd bench --random-input-len 512 --random-output-len 128 --num-prompts 200 --max-concurrency 32
  runnerd bench --request-rate 4 --goodput ttft:500 tpot:50 --metric-percentiles 50,90,99
  runnerd bench --dataset-name custom --dataset-path prompts.jsonl --save-result --result-dir results
  runnerd bench --plot bench.png
  runnerd bench --compare before.json after.json
"""


_count_from_0 = values.argument(values.count(0))
_count_from_1 = values.argument(values.count(1))
_prompt_length = values.argument(values.count(1, 10_000_000))
_prefix_length = values.argument(values.count(0, 10_000_000))
_seed = values.argument(values.count(0, 2**63 - 1))
_LEAST, _MOST = 1e-6, 1e9


@values.argument
def _positive(text: str) -> float:
    """Take a number above 0 whose inverse is one, too."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"a number from {_LEAST:f} to {_MOST:.0f}")
    return value


@values.argument
def _rate(text: str) -> float:
    """Take a rate; "inf" is one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (_LEAST <= value <= _MOST or value == math.inf):
        raise ValueError(f"a number from {_LEAST:f} to {_MOST:.0f}, or inf")
    return value


@values.argument
def _percentiles(text: str) -> tuple[float, ...]:
    try:
        parsed = tuple(float(one) for one in text.split(","))
    except ValueError:
        parsed = (math.nan,)
    if not all(0 <= one <= 100 for one in parsed):
        raise ValueError("numbers from 0 to 100 with commas between them")
    return parsed


@values.argument
def _metric_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= METRICS.keys():
        raise ValueError(f"some of {','.join(METRICS)} with commas between them")
    return names


@values.argument
def _limit(text: str) -> tuple[str, float]:
    found = re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ValueError("ttft, tpot or e2el, a colon and milliseconds, such as ttft:200")
    return found[1], float(found[2])


@values.argument
def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError("KEY=VALUE")
    return key, value


def _noting(action: type[argparse.Action]) -> type[argparse.Action]:
    """Give ``action``, which also keeps the flag itself in ``given``."""

    class Noting(action):  # type: ignore[valid-type,misc]
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: object, flag: str | None = None
        ) -> None:
            namespace.given = (*namespace.given, flag)
            super().__call__(parser, namespace, value, flag)

    return Noting


def add(parser: argparse.ArgumentParser) -> None:
    """Add all flags; those that are given will stand in ``given``."""
    for name, action in (
        (None, argparse._StoreAction),
        ("store_true", argparse._StoreTrueAction),
        ("extend", argparse._ExtendAction),
    ):
        parser.register("action", name, _noting(action))
    parser.set_defaults(given=())
    add_connection(parser)
    _add_dataset(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_results(parser.add_argument_group("results"))


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=("random", "custom"),
        default="random",
        help="random token ids, or the prompts of a JSONL file (default: random)",
    )
    group.add_argument(
        "--random-input-len", type=_prompt_length, default=1024, metavar="N", help="prompt tokens (default: 1024)"
    )
    group.add_argument(
        "--random-output-len", type=_count_from_1, default=128, metavar="N", help="output tokens (default: 128)"
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="draw both lengths evenly from length*(1-X) to length*(1+X) (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=_prefix_length,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, before their own",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='JSONL: {"prompt": TEXT} or {"messages": [...]} a line, if you like with "output_len"',
    )
    group.add_argument(
        "--custom-output-len", type=_count_from_1, default=256, metavar="N", help="where a line has none (default: 256)"
    )
    group.add_argument(
        "--skip-chat-template", action="store_true", help="send a prompt as it is, also where the model has a template"
    )
    group.add_argument("--disable-shuffle", action="store_true", help="send the prompts of the file in its order")
    group.add_argument("--num-prompts", type=_count_from_1, default=100, metavar="N", help="requests (default: 100)")
    group.add_argument("--ignore-eos", action="store_true", help="generate the whole output length")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    group.add_argument("--top-p", type=float, metavar="X", help="default: the server's")
    group.add_argument("--top-k", type=_count_from_0, metavar="N", help="default: the server's")
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help="of prompts, arrivals and sampling")
    group.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="find prefixes that runs with this text cached (default: one drawn for this run: it starts cold)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-concurrency", type=_count_from_1, metavar="N", help="most live requests (default: all)")
    group.add_argument(
        "--request-rate",
        type=_rate,
        default=math.inf,
        metavar="X",
        help="requests a second on average, in a Poisson process; inf: all at once (default)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of the gaps: 1 is Poisson (default), less more bursts, more more even",
    )
    group.add_argument(
        "--num-warmups",
        type=_count_from_0,
        default=1,
        metavar="N",
        help=f"requests before, not measured, of {WARMUP_TOKENS} output tokens at most (default: 1)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=(50.0, 90.0, 99.0),
        metavar="LIST",
        help="such as 90,99.9 (default: 50,90,99)",
    )
    group.add_argument(
        "--percentile-metrics",
        type=_metric_names,
        default=tuple(METRICS),
        metavar="LIST",
        help=f"metrics in the table (default: {','.join(METRICS)})",
    )
    group.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        action="extend",
        default=[],
        metavar="METRIC:MS",
        help="count requests a second that keep each of these limits, such as ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="write them and those of each request")
    group.add_argument("--result-dir", default=".", metavar="FOLDER", help="where to (default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="default: made of rate, concurrency, model and time")
    group.add_argument(
        "--metadata", type=_pair, nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="put into the JSON"
    )
    group.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw latencies and throughput; needs pip install 'runnerd[bench]'"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BASE", "NEW"), help="measure nothing: compare two written results"
    )


def check_compare(arguments: argparse.Namespace) -> None:
    """Check that nothing is asked for beside the comparison, which measures nothing.

    Raises:
        DatasetError: Something is.
    """
    others = sorted({flag for flag in arguments.given if flag != "--compare"})
    if others:
        raise DatasetError(f"--compare measures nothing: leave out {', '.join(others)}")


def check(arguments: argparse.Namespace) -> None:
    """Check what needs no server, and make dictionaries of pairs.

    Raises:
        DatasetError: Flags do not go together, or a file cannot be written.
        PlotUnavailable: There is nothing to draw with.
    """
    if (arguments.dataset_name == "custom") != (arguments.dataset_path is not None):
        raise DatasetError("--dataset-name custom and --dataset-path go together; give both or neither")
    of_a_file = sorted(
        {flag for flag in arguments.given if flag in ("--result-dir", "--result-filename", "--metadata")}
    )
    if of_a_file and not (arguments.save_result or arguments.save_detailed):
        raise DatasetError(f"{', '.join(of_a_file)}: no result is written; add --save-result or --save-detailed")
    arguments.goodput, arguments.metadata = dict(arguments.goodput), dict(arguments.metadata)
    if arguments.plot is not None:
        plot.check_available()
        if arguments.plot.is_dir() or not arguments.plot.parent.is_dir():
            raise DatasetError(f"cannot write {arguments.plot}: give --plot a file in a folder that is there")


def requests(arguments: argparse.Namespace, vocab_size: int, *, has_chat_template: bool) -> list[BenchRequest]:
    """Make the requests.

    Raises:
        DatasetError: They cannot be made as they were asked for.
    """
    count, seed = arguments.num_prompts, arguments.seed
    if arguments.dataset_name == "random":
        dataset = RandomDataset(
            arguments.random_input_len,
            arguments.random_output_len,
            arguments.random_range_ratio,
            arguments.random_prefix_len,
        )
        return dataset.requests(count, vocab_size, seed)
    as_chat = has_chat_template and not arguments.skip_chat_template
    read = read_jsonl(arguments.dataset_path, arguments.custom_output_len, as_chat=as_chat)
    if count > len(read):
        print(
            f"runnerd: {arguments.dataset_path} has {len(read)} prompts for --num-prompts {count}: they repeat, and "
            "repeated ones may come from the prefix cache",
            file=sys.stderr,
        )
    return pick(read, count, seed, shuffle=not arguments.disable_shuffle)
