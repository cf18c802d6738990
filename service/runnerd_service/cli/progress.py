"""Shows the start-up's progress: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Never, Self

from tqdm import tqdm

logger = logging.getLogger(__name__)

_LOG_SHARES = 4


class ProgressReporter:
    """Takes ``(stage, done, total)`` calls; close it, or use it as a context manager, to leave the terminal clean.

    Args:
        bars: Draw bars on stderr; None: when it is a terminal.
    """

    def __init__(self, bars: bool | None = None) -> None:
        self._bars = sys.stderr.isatty() if bars is None else bars
        self._bar: tqdm[Never] | None = None
        self._stage: str | None = None
        self._logged_share = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` of a stage is done."""
        if stage != self._stage:
            self.close()
            self._stage, self._logged_share = stage, -1
            if self._bars:
                self._bar = tqdm(total=total, desc=stage, file=sys.stderr, unit_scale=True)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
            return
        share = done * _LOG_SHARES // max(total, 1)
        if share > self._logged_share:
            self._logged_share = share
            logger.info("%s: %d of %d", stage, done, total)

    def close(self) -> None:
        """End the bar of the present stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
