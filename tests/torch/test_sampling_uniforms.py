import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runnerd_torch.sampling.uniforms import seed_states, uniforms

SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
INDICES = st.integers(min_value=0, max_value=2**31)


def uniform(seed: int, index: int) -> float:
    return float(uniforms(seed_states(np.array([seed], np.uint64)), np.array([index], np.int64))[0])


def reference(seed: int, index: int) -> float:
    """The documented formula in plain integers."""

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    return (mix((mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


def test_seed_zero_gives_the_published_splitmix64_sequence() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [uniform(0, index) for index in range(4)] == [(value >> 11) / 2**53 for value in published]


def test_the_numbers_of_a_seed_never_change_between_releases() -> None:
    golden = {
        (1, 0): 0.7497482413580301,
        (42, 7): 0.15289334222649975,
        (2**64 - 1, 4095): 0.8811123988031333,
    }
    assert {key: uniform(*key) for key in golden} == golden


@given(SEEDS, INDICES)
def test_each_number_follows_the_documented_formula(seed: int, index: int) -> None:
    assert uniform(seed, index) == reference(seed, index)
    assert 0 <= uniform(seed, index) < 1


@given(st.lists(st.tuples(SEEDS, INDICES), min_size=1, max_size=20))
def test_a_number_does_not_depend_on_the_others_of_the_batch(pairs: list[tuple[int, int]]) -> None:
    seeds, indices = zip(*pairs, strict=True)
    together = uniforms(seed_states(np.array(seeds, np.uint64)), np.array(indices, np.int64))
    assert together.tolist() == [uniform(seed, index) for seed, index in pairs]


def test_numbers_are_uniform_along_outputs_and_along_neighbouring_seeds() -> None:
    count, bins = 20_000, 50
    along_outputs = uniforms(seed_states(np.full(count, 7, np.uint64)), np.arange(count))
    along_seeds = uniforms(seed_states(np.arange(count, dtype=np.uint64)), np.full(count, 3))
    for numbers in (along_outputs, along_seeds):
        observed, _ = np.histogram(numbers, bins=bins, range=(0, 1))
        chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
        assert chi_square < 95  # 49 degrees of freedom: exceeded by chance once in 10,000
        assert abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])) < 0.03
