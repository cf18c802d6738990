"""How many steps are to be in flight. It decides by sums of time alone and knows no step, request or runner."""

from __future__ import annotations

_WINDOW_STEPS = 32
"""Steps between two decisions: enough that one slow step does not turn one."""

_FALL_SHARE, _RISE_SHARE = 0.02, 0.03
"""Two shares, so that a load between them does not go back and forth."""


class AdaptiveDepth:
    """Overlaps steps only where there is something to gain.

    With D the device's time of a step and H the host's, a synchronous step takes D + H, an overlapped one max(D, H): at
    best min(D, H) / (D + H) of it is saved. Where that is little (the host does nearly all, or next to nothing), one
    step in flight is as fast, and a finish is seen a step earlier.

    Args:
        most: Steps in flight when they overlap; where it begins.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._depth = most
        self._num_steps = 0
        self._device_ns = 0
        self._host_ns = 0

    @property
    def depth(self) -> int:
        """Steps to be in flight now: 1 or ``most``."""
        return self._depth

    def settled(self, device_ns: int, host_ns: int) -> None:
        """Note a settled step.

        Args:
            device_ns: Time that the device has computed, since the start.
            host_ns: Processor time that the host has spent on steps, since the start.
        """
        self._num_steps += 1
        if self._num_steps % _WINDOW_STEPS:
            return
        device, host = device_ns - self._device_ns, host_ns - self._host_ns
        self._device_ns, self._host_ns = device_ns, host_ns
        if not device:  # the runner does not tell
            return
        share = min(device, host) / (device + host)
        if share < _FALL_SHARE:
            self._depth = 1
        elif share > _RISE_SHARE:
            self._depth = self._most
