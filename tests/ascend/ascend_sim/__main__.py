"""Runs a command of this Python's environment on the simulated CANN: ``python -m ascend_sim pytest tests/ascend``."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Replace this process by the command, which is looked up beside the running Python first."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ascend_sim COMMAND [ARGUMENT...]")
    # The kernels import torch, which would import torch_npu, which needs what is built here.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from ascend_sim.environment import cann_environment

    try:
        environment = os.environ | cann_environment()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    os.environ.update(environment)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
