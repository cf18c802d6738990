"""How the front process collects its garbage: seldom, so that it holds up no stream.

A step of the engine makes objects for all streams at once, which Python's usual thresholds take for a reason to look at
everything that is there, several times a second, for tens of milliseconds with many streams.
"""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 10_000
_YOUNG_COLLECTIONS = 10
_MIDDLE_COLLECTIONS = 10


def collect_seldom() -> None:
    """Leave out what there is now, the modules and the model's tokenizer, and look at the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
