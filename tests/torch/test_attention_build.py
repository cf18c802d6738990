"""How the native kernel is compiled, cached and chosen, and how wrong calls are refused."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from runnerd_spi.errors import RunnerUnavailable
from runnerd_torch.attention import AttentionMetadata, PagedAttention, build_attention
from runnerd_torch.native.compile import CompileError, library_of

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    path.write_text(TINY)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_second_start_takes_the_library_from_the_cache(source: Path, environ: dict[str, str]) -> None:
    first = library_of(source, environ)
    modified = first.stat().st_mtime_ns
    assert library_of(source, environ) == first
    assert first.stat().st_mtime_ns == modified
    assert list(first.parent.iterdir()) == [first]


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"x" * 20_000])
def test_damaged_library_in_the_cache_is_compiled_anew(
    source: Path, environ: dict[str, str], damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    intact = library_of(source, environ)
    content = intact.read_bytes()
    intact.write_bytes(damage)
    anew = library_of(source, environ)
    assert anew.read_bytes() == content
    assert "is damaged; compiling it anew" in caplog.text


def test_changed_source_is_not_served_from_the_cache(source: Path, environ: dict[str, str]) -> None:
    before = library_of(source, environ)
    source.write_text(TINY.replace("42", "43"))
    assert library_of(source, environ) != before


def test_library_loads_after_processes_compiled_it_at_the_same_time(source: Path, environ: dict[str, str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: library_of(source, environ), range(4)))
    for library in libraries:
        assert library_of(source, environ).read_bytes() == library.read_bytes()


def test_compiler_of_cxx_is_used(source: Path, environ: dict[str, str], tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.write_text("#!/bin/sh\necho 'cannot read the source' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(CompileError, match=r"my-compiler.*exit code 1:\ncannot read the source"):
        library_of(source, environ | {"CXX": str(compiler)})


def test_source_that_does_not_compile_gives_the_compilers_words(source: Path, environ: dict[str, str]) -> None:
    source.write_text("not C++")
    with pytest.raises(CompileError, match=r"(?s)exit code 1:.*error"):
        library_of(source, environ)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_auto_without_a_compiler_is_torch_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert build_attention("auto").name == "torch"
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()


@pytest.mark.usefixtures("no_compiler")
def test_native_without_a_compiler_is_refused_with_the_remedy() -> None:
    with pytest.raises(RunnerUnavailable, match=r"no C\+\+ compiler.*install g\+\+.*or choose attention torch"):
        build_attention("native")


def test_auto_is_native_where_it_compiles() -> None:
    assert build_attention("auto").name == "native"


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected auto, torch or native"):
        build_attention("flash")  # type: ignore[arg-type]


def metadata(seq_len: int = 5, block: int = 1, slot: int = 20) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=torch.tensor([[block]], dtype=torch.int32),
        slot_mapping=torch.tensor([slot]),
        query_start_loc_cpu=np.array([0, 1], np.int32),
        seq_lens_cpu=np.array([seq_len], np.int32),
        num_rows=1,
        max_query_len=1,
        max_seq_len=seq_len,
        block_size=16,
    )


@pytest.fixture(scope="module", params=["torch", "native"])
def attention(request: pytest.FixtureRequest) -> PagedAttention:
    return build_attention(request.param)


def test_block_outside_the_cache_is_refused(attention: PagedAttention) -> None:
    cache = torch.zeros(4, 16, 2, 8)
    for block in (-1, 4):
        with pytest.raises(IndexError, match=r"a block outside 0\.\.3"):
            attention.forward(torch.zeros(1, 4, 8), cache, cache.clone(), metadata(block=block), 1.0)


def test_slot_outside_the_cache_is_refused_and_nothing_written(attention: PagedAttention) -> None:
    key_cache, value_cache = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)
    new = torch.ones(1, 2, 8)
    for slot in (-1, 64):
        with pytest.raises(IndexError, match=r"a slot outside 0\.\.63"):
            attention.write(new, new, key_cache, value_cache, metadata(slot=slot))
    assert not key_cache.any()
    assert not value_cache.any()


@pytest.mark.parametrize("query", [torch.zeros(2, 4, 8), torch.zeros(1, 3, 8), torch.zeros(1, 4, 8).half()])
def test_query_that_does_not_fit_the_cache_is_refused(attention: PagedAttention, query: torch.Tensor) -> None:
    cache = torch.zeros(4, 16, 2, 8)
    with pytest.raises(ValueError, match="expected"):
        attention.forward(query, cache, cache.clone(), metadata(), 1.0)


def test_native_refuses_lengths_that_the_block_table_cannot_hold() -> None:
    cache = torch.zeros(4, 16, 2, 8)
    with pytest.raises(ValueError, match="the lengths contradict each other"):
        build_attention("native").forward(torch.zeros(1, 4, 8), cache, cache.clone(), metadata(seq_len=17), 1.0)


def test_metadata_of_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slot_mapping is torch\.int32 .* expected torch\.int64"):
        AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([1], dtype=torch.int32),
            block_tables=torch.tensor([[0]], dtype=torch.int32),
            slot_mapping=torch.tensor([0], dtype=torch.int32),
            query_start_loc_cpu=np.array([0, 1], np.int32),
            seq_lens_cpu=np.array([1], np.int32),
            num_rows=1,
            max_query_len=1,
            max_seq_len=1,
            block_size=16,
        )


def test_strided_views_give_the_same_as_contiguous_tensors(attention: PagedAttention) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(4, 16, 2, 8, generator=generator)
    heads_first = torch.randn(4, 1, 8, generator=generator).transpose(0, 1)
    columns_apart = torch.randn(1, 4, 16, generator=generator)[..., ::2]
    for query in (heads_first, columns_apart):
        expected = attention.forward(query.contiguous(), cache, cache.clone(), metadata(), 0.3)
        assert torch.equal(attention.forward(query, cache, cache.clone(), metadata(), 0.3), expected)
