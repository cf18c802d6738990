"""The kit on a small model with random weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tiny_model import write_tiny_model

from runnerd_spi.testing import conformance_tests

_FOLDER = tempfile.TemporaryDirectory()
_MODEL = Path(_FOLDER.name) / "tiny.gguf"
write_tiny_model(_MODEL)

# In float32, and not quantised: there a request gets the same tokens alone and in any batch.
TestConformance = conformance_tests(
    "llamacpp", model=str(_MODEL), dtype="float32", options={"num_threads": 1}, num_traces=30
)
