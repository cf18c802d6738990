"""Tests of the scheduler share a bench, which they import as a module."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
