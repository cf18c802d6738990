"""A server that cannot use its NPU says why in one line with the remedy, and ends with exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemons import ended, make_served_model, serving
from runnerd_client import Client

WITHOUT_CANN = {"LD_LIBRARY_PATH": "", "ASCEND_HOME_PATH": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("models"))


CASES = {
    "no CANN": ((), WITHOUT_CANN, "CANN was not found (libascendcl.so); source "),
    "no device": ((), {"ASCEND_SIM_DEVICES": "0"}, "no NPU was found; see whether `npu-smi info` lists one"),
    "index": (("--runner-option", "device_index=3"), {}, "option device_index is 3, expected 0"),
    "visible": (
        (),
        {"ASCEND_RT_VISIBLE_DEVICES": "all"},
        "is 'all', expected device numbers",
    ),
    "blocking": ((), {"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING=1"),
    "task queue": (
        (),
        {"TASK_QUEUE_ENABLE": "2"},
        "TASK_QUEUE_ENABLE is 2; set it to 1, or pass --enforce",
    ),
    "attention": (
        ("--runner-option", "attention=flash"),
        {},
        "attention is 'flash', expected auto, fused, torch",
    ),
    "float32": (("--dtype", "float32", "--runner-option", "attention=fused"), {}, "takes bfloat16 and float16"),
    "block size": (("--block-size", "16"), {}, "--block-size"),
    "tensor parallel": (("--tensor-parallel-size", "2"), {}, "does not serve tensor parallelism"),
    "pipeline parallel": (("--pipeline-parallel-size", "2"), {}, "does not serve pipeline parallelism"),
    "speculative": (("--speculative-model", "draft"), {}, "does not serve speculative decoding"),
}


@pytest.mark.parametrize(("arguments", "environment", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_served_is_named_at_the_start(model, arguments, environment, message):
    finished = ended(str(model), "--runner", "ascend", *arguments, environment=environment)
    assert finished.returncode == 2, finished.stderr
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("runnerd: ")
    assert message in last


def test_weights_that_do_not_fit_are_named(tmp_path):
    from driving import make_checkpoint

    # 64 MiB of weights and a device of 32 MiB
    path = make_checkpoint(tmp_path, "LlamaConfig", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    (path / "tokenizer.json").write_bytes((make_served_model(tmp_path / "other") / "tokenizer.json").read_bytes())
    environment = {"ASCEND_SIM_MEMORY_MB": "32"}
    finished = ended(str(path), "--runner", "ascend", "--dtype", "float32", environment=environment)
    assert finished.returncode == 2, finished.stderr
    last = finished.stderr.strip().splitlines()[-1]
    assert "the weights take" in last
    assert "bytes free; free the device" in last


def test_a_machine_with_torch_npu_and_no_cann_serves_the_cpu(model):
    with serving(str(model), "--runner", "cpu", environment=WITHOUT_CANN) as daemon, Client(daemon.address) as client:
        answer = client.generate("w5 w9 w12", temperature=0.0, max_tokens=4, ignore_eos=True, tokens=True)
    assert len(answer.outputs[0].tokens) == 4


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_the_user_says_of_autoloading_holds(value):
    program = "import os, runnerd_torch; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": value}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == value
