"""Where native kernels get their threads from. It knows nothing of what they compute."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def parallel_region_of_torch() -> int | None:
    """Give the address of the function with which PyTorch itself starts threads, so that both use one thread pool.

    None if PyTorch was built with another one.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        entry = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        logger.info("PyTorch's thread pool is out of reach; native kernels start their own threads")
        return None
    return ctypes.cast(entry, ctypes.c_void_p).value
