"""What can be known of an Ascend installation without importing torch_npu: packages, CANN's files, variables.

Each finding is a line that names what is wrong and what to do. This module imports no framework and opens no device.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from runnerd_spi import RunnerUnavailable

_CANN_LIBRARIES = ("libascendcl.so", "libhccl.so")
_SET_ENV_SCRIPTS = (
    "usr/local/Ascend/cann/set_env.sh",
    "usr/local/Ascend/ascend-toolkit/set_env.sh",
)
_ROOT = Path("/")


def check_environment(environment: Mapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """Refuse an installation on which the runner could not work.

    Args:
        environment: The process's variables.
        root: Where the system's files are.

    Raises:
        RunnerUnavailable: With the first reason and its remedy.
    """
    for reason in _reasons(environment, root):
        raise unavailable(reason)


def check_graphs(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse variables with which no graph can be captured.

    Raises:
        RunnerUnavailable: With the variable and the two remedies.
    """
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        raise unavailable(
            "ASCEND_LAUNCH_BLOCKING=1 makes each kernel wait, and a graph cannot be captured so; unset it, or pass "
            "--enforce-eager"
        )
    if environment.get("TASK_QUEUE_ENABLE") == "2":
        raise unavailable(
            "torch_npu captures no graph while TASK_QUEUE_ENABLE is 2; set it to 1, or pass --enforce-eager"
        )


def hide_unusable_torch_npu(environment: Mapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """Make torch_npu unknown to this process where CANN is missing, before transformers is imported.

    transformers imports torch_npu wherever it is installed, whichever device is meant, and cannot be used where that
    fails.
    """
    if not all(_is_findable(library, environment, root) for library in _CANN_LIBRARIES):
        # None is Python's own sign for a module that must not be imported.
        sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]


def unavailable(reason: str) -> RunnerUnavailable:
    """Give the error for ``reason``, which holds its remedy."""
    return RunnerUnavailable(f"runner 'ascend' cannot be used: {reason}")


def visible_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Give the devices that ``ASCEND_RT_VISIBLE_DEVICES`` names; None when it is not set.

    Raises:
        ValueError: It is no list of device numbers.
    """
    text = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if text is None:
        return None
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(text)
    return numbers


def set_env_script(root: Path = _ROOT) -> str:
    """Give the script that puts CANN into the environment: the one found, or the usual place."""
    found = [root / script for script in _SET_ENV_SCRIPTS if (root / script).is_file()]
    return str(found[0] if found else root / _SET_ENV_SCRIPTS[-1])


def _reasons(environment: Mapping[str, str], root: Path) -> Iterator[str]:
    yield from _package_reasons()
    yield from _library_reasons(environment, root)
    yield from _variable_reasons(environment)


def _package_reasons() -> Iterator[str]:
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            yield f"{name} is not installed; pip install 'runnerd[ascend]'"
    torch_version = version("torch")
    if find_spec("torch_npu") is None:
        yield f"torch_npu is not installed; pip install --no-deps torch-npu=={_release(torch_version)}"
    try:
        npu_version = version("torch-npu")
    except PackageNotFoundError:
        yield "torch_npu has no package metadata; reinstall torch-npu"
        return
    if _release(torch_version) != _release(npu_version):
        yield (
            f"torch_npu {npu_version} is made for torch {_release(npu_version)}, but torch is {torch_version}; "
            f"pip install --no-deps torch-npu=={_release(torch_version)}"
        )


def _library_reasons(environment: Mapping[str, str], root: Path) -> Iterator[str]:
    for library in _CANN_LIBRARIES:
        if not _is_findable(library, environment, root):
            yield f"CANN was not found ({library}); source {set_env_script(root)} before runnerd is started"


def _is_findable(library: str, environment: Mapping[str, str], root: Path) -> bool:
    """Whether the loader would find it: by the search path, or in the cache of the system's libraries."""
    folders = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    if any((Path(folder) / library).exists() for folder in folders):
        return True
    try:
        return library.encode() in (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return False


def _variable_reasons(environment: Mapping[str, str]) -> Iterator[str]:
    try:
        visible_devices(environment)
    except ValueError:
        yield (
            f"ASCEND_RT_VISIBLE_DEVICES is {environment['ASCEND_RT_VISIBLE_DEVICES']!r}, expected device numbers "
            "such as 0 or 0,1; set it so, or unset it"
        )
        return
    task_queue = environment.get("TASK_QUEUE_ENABLE", "1")
    if task_queue not in ("0", "1", "2"):
        yield f"TASK_QUEUE_ENABLE is {task_queue!r}, expected 0, 1 or 2; set it so, or unset it"
    allocator = environment.get("PYTORCH_NPU_ALLOC_CONF", "").lower().replace(" ", "")
    if "expandable_segments:true" in allocator:
        for other in ("max_split_size_mb", "garbage_collection_threshold"):
            if other in allocator:
                yield (
                    f"PYTORCH_NPU_ALLOC_CONF asks for expandable_segments and {other}, which exclude each other; "
                    "keep one of them"
                )


def _release(text: str) -> str:
    """Give the release of a version without its local and post parts: "2.13.0" of "2.13.0.post4+cpu"."""
    found = re.match(r"\d+(\.\d+){0,2}", text)
    return found[0] if found else text
