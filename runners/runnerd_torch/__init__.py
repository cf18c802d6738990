"""The PyTorch runners.

Each imports its device's extension itself, when it is asked for. PyTorch would import all that are installed with
``import torch``, and fail there when one lacks its driver, for a runner on the CPU too; so that is switched off before
any module of this package imports torch.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
