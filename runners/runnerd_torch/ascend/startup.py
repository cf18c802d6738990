"""Opens an NPU, or says in one line why it cannot be: torch_npu's and CANN's errors become reasons with remedies."""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

import torch

from runnerd_spi import InvalidOption
from runnerd_torch.ascend.environment import check_environment, set_env_script, unavailable
from runnerd_torch.devices.accelerator import AcceleratorDevice
from runnerd_torch.devices.npu import NpuElapsedTime

logger = logging.getLogger(__name__)

_LEAST_CANN = (9, 1)
"""The release that torch_npu 2.12 asks for; an older one cannot serve 2.13."""


def open_device(device_index: int) -> AcceleratorDevice:
    """Import torch_npu and open a device.

    Args:
        device_index: Among the visible ones.

    Raises:
        RunnerUnavailable: torch_npu, CANN or the devices are not usable; the message holds the remedy.
        InvalidOption: There is no such device.
    """
    check_environment()
    torch_npu = _import_torch_npu()
    npu: Any = torch.get_device_module("npu")
    count = _count_devices(npu)
    if not 0 <= device_index < count:
        most = f"0 to {count - 1}" if count > 1 else "0"
        raise InvalidOption(
            f"runner 'ascend': option device_index is {device_index}, expected {most}; {_visibility(count)}"
        )
    device = torch.device("npu", device_index)
    try:
        torch.accelerator.set_device_index(device_index)
        name = str(npu.get_device_name(device_index))
    except RuntimeError as error:
        raise unavailable(
            f"device {device_index} cannot be opened: {_first_line(error)}; see whether another process holds it "
            "(npu-smi info), and whether driver and CANN fit"
        ) from error
    _check_cann(torch_npu)
    return AcceleratorDevice(device, f"Ascend {name.removeprefix('Ascend')} (npu:{device_index})", NpuElapsedTime())


def _import_torch_npu() -> ModuleType:
    try:
        return importlib.import_module("torch_npu")
    except ImportError as error:
        raise unavailable(
            f"torch_npu cannot load CANN: {_first_line(error)}; source {set_env_script()} before runnerd is started"
        ) from error
    except RuntimeError as error:
        text = _first_line(error)
        remedy = "see that torch, torch_npu and CANN fit each other"
        if "Two accelerators" in text:
            remedy = "install the CPU build of torch"
        raise unavailable(f"torch_npu cannot be imported: {text}; {remedy}") from error


def _count_devices(npu: Any) -> int:
    count = int(npu.device_count())
    if not count:
        shown = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        which = "" if shown is None else f" among ASCEND_RT_VISIBLE_DEVICES={shown}"
        raise unavailable(
            f"no NPU was found{which}; see whether `npu-smi info` lists one, and whether this user may open "
            "/dev/davinci*"
        )
    return count


def _visibility(count: int) -> str:
    shown = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if shown is None:
        return f"this machine has {count}"
    return f"ASCEND_RT_VISIBLE_DEVICES={shown} shows {count}, counted from 0"


def _check_cann(torch_npu: ModuleType) -> None:
    try:
        text = str(torch_npu.npu.utils.get_cann_version())
    except RuntimeError as error:
        logger.debug("the version of CANN cannot be read: %s", error)
        return
    found = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if len(found) == 2 and found < _LEAST_CANN:
        least = ".".join(map(str, _LEAST_CANN))
        raise unavailable(
            f"CANN is {text}, and torch_npu {torch_npu.__version__} needs {least} or newer; install a newer CANN, "
            "or an older torch and torch_npu"
        )
    logger.info("torch_npu %s on CANN %s", torch_npu.__version__, text or "of unknown version")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
