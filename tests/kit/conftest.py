"""The kit's tests import the reference runner and its mutants as modules, as the kit's own process does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
