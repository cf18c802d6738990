"""The environment of a process that is to see the simulated CANN."""

from __future__ import annotations

import os
from pathlib import Path

from ascend_sim.build import build


def cann_environment(**options: object) -> dict[str, str]:
    """Give the variables that a process must have when it starts.

    Args:
        options: Of the simulation, without their prefix, in lower case: ``copy_us=2000``.
    """
    folder = str(build())
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "ASCEND_HOME_PATH": folder,
        "ASCEND_OPP_PATH": f"{folder}/opp",
        "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(libraries)),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **{f"ASCEND_SIM_{name.upper()}": str(value) for name, value in options.items()},
    }
