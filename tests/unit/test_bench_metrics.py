"""The figures of ``runnerd bench``, from timelines whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from runnerd_bench.arrivals import arrival_times
from runnerd_bench.dataset import BenchRequest, DatasetError, RandomDataset, pick, read_jsonl
from runnerd_bench.driver import Run
from runnerd_bench.metrics import max_concurrent, output_rate, summarise
from runnerd_bench.record import RequestRecord
from runnerd_bench.report import busy_warning, comparison, table


def record(start: float, times: list[float], output_tokens: int, prompt_tokens: int = 10) -> RequestRecord:
    return RequestRecord(start, times, times[-1], prompt_tokens, output_tokens)


FAST = record(0.0, [0.1, 0.2, 0.4], output_tokens=4)  # TTFT 100, TPOT 100, ITL 100 and 200, E2E 400 ms
SLOW = record(1.0, [1.5, 2.5], output_tokens=3, prompt_tokens=20)  # TTFT 500, TPOT 500, ITL 1000, E2E 1500 ms
SINGLE = record(2.0, [2.3], output_tokens=1)  # TTFT and E2E 300 ms, no TPOT, no ITL
FAILED = RequestRecord(start=0.2, end=2.2, error="UNAVAILABLE: gone")


def test_figures_of_a_known_timeline() -> None:
    run = Run([FAST, SLOW, SINGLE, FAILED], seconds=4.0, client_cpu_seconds=1.0)
    figures = summarise(run, [50, 99.5], {"ttft": 301, "tpot": 101})
    expected = {
        "duration": 4,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 40,
        "total_output_tokens": 8,
        "request_throughput": 0.75,
        "request_goodput": 0.5,  # FAST and SINGLE keep both limits
        "output_throughput": 2,
        "total_token_throughput": 12,
        "max_concurrent_requests": 3,
        "total_messages": 6,
        "client_cpu_share": 0.25,
        "mean_ttft_ms": 300,
        "median_ttft_ms": 300,
        "std_ttft_ms": np.sqrt((200**2 + 200**2) / 3),
        "p50_ttft_ms": 300,
        "p99.5_ttft_ms": 498,
        "mean_tpot_ms": 300,
        "p50_tpot_ms": 300,
        "mean_itl_ms": 1300 / 3,
        "p50_itl_ms": 200,
        "mean_e2el_ms": 2200 / 3,
        "p50_e2el_ms": 400,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_a_metric_without_a_sample_has_no_figures() -> None:
    figures = summarise(Run([FAILED], 1.0, 0.1), [90])
    assert figures["completed"] == figures["total_output_tokens"] == figures["max_output_tokens_per_s"] == 0
    assert [figures[f"{kind}_ttft_ms"] for kind in ("mean", "median", "std", "p90")] == [None] * 4
    assert figures["request_goodput"] is None


def test_output_tokens_are_counted_in_the_second_in_which_their_message_came() -> None:
    first, second, third = output_rate([FAST, SLOW, SINGLE])
    assert (first, second, third) == pytest.approx((4, 1.5, 2.5))
    assert sum(output_rate([FAST, SLOW, SINGLE], 0.5)) * 0.5 == pytest.approx(8)


def test_one_request_that_ends_when_the_next_starts_is_not_concurrent_with_it() -> None:
    assert max_concurrent([record(0, [1], 1), record(1, [2], 1)]) == 1
    assert max_concurrent([record(0, [1.1], 1), record(1, [2], 1), record(1.05, [3], 1)]) == 3


def test_arrivals_are_a_poisson_process_of_the_asked_rate() -> None:
    times = arrival_times(20_000, 50, burstiness=1, seed=1)
    gaps = np.diff([0, *times])
    assert times == arrival_times(20_000, 50, burstiness=1, seed=1) != arrival_times(20_000, 50, 1, seed=2)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)  # exponential: as large as the mean
    assert np.mean(gaps > 1 / 50) == pytest.approx(np.exp(-1), rel=0.03)
    even = np.diff([0, *arrival_times(20_000, 50, burstiness=100, seed=1)])
    assert even.std() == pytest.approx(even.mean() / 10, rel=0.05)
    assert arrival_times(3, float("inf"), 1, 0) == [0, 0, 0]


def test_random_prompts_have_the_asked_lengths_and_repeat_with_the_seed() -> None:
    dataset = RandomDataset(input_len=20, output_len=7)
    requests = dataset.requests(5, 50_000, seed=3)
    assert [(len(one.prompt), one.output_len) for one in requests] == [(20, 7)] * 5
    assert requests == dataset.requests(5, 50_000, seed=3) != dataset.requests(5, 50_000, seed=4)
    assert len({tuple(one.prompt) for one in requests}) == 5
    assert all(0 <= token < 50_000 for one in requests for token in one.prompt)


def test_random_lengths_spread_by_the_range_ratio_behind_a_shared_prefix() -> None:
    requests = RandomDataset(20, 10, range_ratio=0.5, prefix_len=4).requests(300, 300, seed=0)
    assert {len(one.prompt) for one in requests} == set(range(14, 35))
    assert {one.output_len for one in requests} == set(range(5, 16))
    assert len({tuple(one.prompt[:4]) for one in requests}) == 1
    with pytest.raises(DatasetError, match="--random-range-ratio"):
        RandomDataset(20, 10, range_ratio=1)


def test_a_file_gives_prompts_and_conversations(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = '[{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]'
    path.write_text('{"prompt": "one", "output_len": 5}\n\n{"messages": ' + turns + "}\n")
    conversation = BenchRequest([{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}], 9)
    assert read_jsonl(path, 9, as_chat=False) == [BenchRequest("one", 5), conversation]
    (as_chat, _) = read_jsonl(path, 9, as_chat=True)
    assert as_chat == BenchRequest([{"role": "user", "content": "one"}], 5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "expected a JSON object"),
        ("[]", "got list"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": ""}', "prompt: expected a text"),
        ('{"prompt": "a", "output_len": 0}', "output_len is 0"),
        ('{"prompt": "a", "max_tokens": 5}', "unknown key 'max_tokens'"),
        ('{"messages": [{"role": "user"}]}', "messages: expected a list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=f"prompts.jsonl:2: .*{message}"):
        read_jsonl(path, 9, as_chat=False)


def test_each_prompt_comes_once_before_one_comes_again() -> None:
    requests = [BenchRequest(f"{number}", 1) for number in range(10)]
    assert pick(requests, 25, 0, shuffle=False) == [*requests, *requests, *requests[:5]]
    shuffled = pick(requests, 20, 5, shuffle=True)
    assert shuffled[:10] == shuffled[10:] == pick(requests, 10, 5, shuffle=True) != requests
    assert {one.prompt for one in shuffled} == {one.prompt for one in requests}


def test_a_comparison_gives_ratios_and_says_what_differs() -> None:
    base = {"num_prompts": 8, "duration": 4.0, "output_throughput": 100.0, "mean_ttft_ms": 50.0, "p90_itl_ms": 1.0}
    new = {"num_prompts": 9, "duration": 2.0, "output_throughput": 150.0, "mean_ttft_ms": 25.0}
    text = comparison(base, new)
    assert "differs: num_prompts: 8 / 9" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("duration", "output", "mean"))] == [
        ["duration", "4.00", "2.00", "0.500"],
        ["output_throughput", "100.00", "150.00", "1.500"],
        ["mean_ttft_ms", "50.00", "25.00", "0.500"],
    ]
    assert "only in one of them: p90_itl_ms" in text


def test_the_table_shows_each_figure_and_a_client_at_its_limit_is_told() -> None:
    run = Run([FAST, SLOW], seconds=4.0, client_cpu_seconds=3.9)
    figures = summarise(run, [90], {"ttft": 200})
    text = table(figures, [90], ["ttft", "tpot"])
    assert "Request goodput (req/s):                  0.25" in text
    assert "P90 TTFT (ms):                            460.00" in text
    assert "ITL" not in text
    assert "0.97 CPU cores" in busy_warning(figures)
    assert busy_warning(summarise(Run([FAST], 4.0, 1.0), [])) is None
