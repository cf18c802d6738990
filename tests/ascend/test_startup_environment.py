"""What is said of a broken installation before torch_npu is imported: one line that names the reason and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runnerd_spi import RunnerUnavailable
from runnerd_torch.ascend.environment import check_environment, check_graphs

ROOTS = [path for path in sys.path if Path(path).name in ("protos", "service", "runners", "python")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system without CANN."""
    return tmp_path / "root"


@pytest.fixture
def cann(tmp_path: Path) -> dict[str, str]:
    """Variables with which the loader finds CANN's libraries."""
    folder = tmp_path / "cann" / "lib64"
    folder.mkdir(parents=True)
    for library in ("libascendcl.so", "libhccl.so"):
        (folder / library).touch()
    return {"LD_LIBRARY_PATH": f"/nowhere:{folder}"}


def reason(environment: dict[str, str], root: Path) -> str:
    with pytest.raises(RunnerUnavailable) as caught:
        check_environment(environment, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_installation_with_cann_is_accepted(cann, root):
    check_environment(cann, root)


def test_cann_in_the_systems_library_cache_is_accepted(root):
    (root / "etc").mkdir(parents=True)
    (root / "etc/ld.so.cache").write_bytes(b"\0libascendcl.so\0libhccl.so\0")
    check_environment({}, root)


def test_without_cann_the_usual_script_is_named(root):
    text = reason({}, root)
    assert "libascendcl.so" in text
    assert f"source {root}/usr/local/Ascend/ascend-toolkit/set_env.sh" in text


def test_a_cann_that_is_installed_but_not_in_the_environment_is_named(root):
    script = root / "usr/local/Ascend/cann/set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    assert f"source {script} before" in reason({"LD_LIBRARY_PATH": "/nowhere"}, root)


def test_a_cann_without_communication_library_is_named(cann, root):
    (Path(cann["LD_LIBRARY_PATH"].split(":")[1]) / "libhccl.so").unlink()
    assert "libhccl.so" in reason(cann, root)


@pytest.mark.parametrize("value", ["", "all", "0,", "0,0", "-1", "0-3"])
def test_visible_devices_that_are_no_numbers_are_named(value, cann, root):
    text = reason(cann | {"ASCEND_RT_VISIBLE_DEVICES": value}, root)
    assert f"ASCEND_RT_VISIBLE_DEVICES is {value!r}, expected device numbers" in text


@pytest.mark.parametrize("value", ["0", "1,0", "7"])
def test_visible_devices_that_are_numbers_are_accepted(value, cann, root):
    check_environment(cann | {"ASCEND_RT_VISIBLE_DEVICES": value}, root)


def test_a_task_queue_mode_that_does_not_exist_is_named(cann, root):
    assert "TASK_QUEUE_ENABLE is '3', expected 0, 1 or 2" in reason(cann | {"TASK_QUEUE_ENABLE": "3"}, root)


@pytest.mark.parametrize("other", ["max_split_size_mb:128", "garbage_collection_threshold:0.8"])
def test_allocator_settings_that_exclude_each_other_are_named(other, cann, root):
    value = f"expandable_segments:True, {other}"
    assert other.partition(":")[0] in reason(cann | {"PYTORCH_NPU_ALLOC_CONF": value}, root)
    check_environment(cann | {"PYTORCH_NPU_ALLOC_CONF": other}, root)


def test_blocking_launches_and_graphs_exclude_each_other():
    with pytest.raises(RunnerUnavailable, match=r"ASCEND_LAUNCH_BLOCKING=1 .* pass --enforce-eager"):
        check_graphs({"ASCEND_LAUNCH_BLOCKING": "1"})
    check_graphs({"ASCEND_LAUNCH_BLOCKING": "0"})
    check_graphs({})


def test_the_second_task_queue_mode_and_graphs_exclude_each_other():
    with pytest.raises(RunnerUnavailable, match=r"TASK_QUEUE_ENABLE is 2; set it to 1, or pass --enforce-eager"):
        check_graphs({"TASK_QUEUE_ENABLE": "2"})
    check_graphs({"TASK_QUEUE_ENABLE": "1"})


def described_runners(*folders: Path, site: bool = True) -> str:
    """Give what `runnerd runners` says with ``folders`` before the installed packages, or instead of them."""
    finished = subprocess.run(
        [sys.executable, *([] if site else ["-S"]), "-m", "runnerd_service", "runners"],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, (*folders, *ROOTS)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return finished.stdout.split("ascend:")[1].split("\n\n")[0]


def packages_without(prefixes: tuple[str, ...], folder: Path) -> Path:
    """Give a folder of the installed packages but those."""
    folder.mkdir()
    for package in Path(pytest.__file__).parents[1].iterdir():
        if not package.name.startswith(prefixes):
            (folder / package.name).symlink_to(package)
    return folder


def test_runners_tells_that_torch_npu_is_missing(tmp_path):
    packages = packages_without(("torch_npu",), tmp_path / "packages")
    text = described_runners(packages, site=False)
    assert "torch_npu is not installed; pip install --no-deps torch-npu==2.13.0" in text


def test_runners_tells_that_torch_is_missing(tmp_path):
    packages = packages_without(("torch-", "torch", "functorch"), tmp_path / "packages")
    assert "torch is not installed; pip install 'runnerd[ascend]'" in described_runners(packages, site=False)


def test_runners_tells_that_torch_and_torch_npu_do_not_fit(tmp_path):
    other = tmp_path / "torch_npu-2.12.0.post1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.12.0.post1\n")
    text = described_runners(tmp_path)
    assert "torch_npu 2.12.0.post1 is made for torch 2.12.0, but torch is 2.13.0" in text
    assert "pip install --no-deps torch-npu==2.13.0" in text


def test_runners_imports_neither_torch_nor_torch_npu():
    program = (
        "import sys; from runnerd_service.rpc.runners import describe_runners; "
        "found = {one.name for one in describe_runners()}; print(found >= {'ascend'}, "
        "[name for name in ('torch', 'torch_npu') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.split() == ["True", "[]"]


@pytest.mark.parametrize("found", [True, False])
def test_torch_npu_is_hidden_from_other_runners_where_it_cannot_be_imported(found, cann):
    program = (
        "import sys; from runnerd_torch.ascend.environment import hide_unusable_torch_npu; hide_unusable_torch_npu(); "
        "from importlib.util import find_spec; print(find_spec('torch_npu') is not None)"
    )
    environment = os.environ | (cann if found else {"LD_LIBRARY_PATH": ""})
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == str(found)
