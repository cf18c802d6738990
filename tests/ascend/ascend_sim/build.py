"""Builds the libraries of the simulated CANN, once for each state of their sources.

Run as a program it prints the folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ascend_sim.ops  # noqa: F401 - registers the kernels
from ascend_sim.registry import KERNELS, Kernel

_SOURCES = Path(__file__).parent / "cann"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "runnerd" / "ascend_sim"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-unused-parameter")
# The wheel needs these to exist; what it calls of them is in libascendcl.so.
_EMPTY = (
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
)
_C_TYPES = {
    "double": "double",
    "float": "float",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "int32": "int32_t",
    "int8": "int8_t",
    "bool": "bool",
    "string": "const char*",
}  # any other kind is the address of an object
# Newer than the documents; without them the wheel takes their forerunners.
_ABSENT = ("aclnnTopkV2",)
_HARMLESS = ("Msprof", "aclop")
_UNSUPPORTED = 207000


def build() -> Path:
    """Give the folder of the libraries, built unless they are there.

    Raises:
        RuntimeError: There is no compiler or no torch_npu, or the compiler fails.
    """
    package = _package("torch_npu")
    sources = {path.name: path.read_text() for path in sorted(_SOURCES.iterdir())}
    sources["opapi.cpp"] = opapi_source(sorted(KERNELS.values(), key=lambda one: one.name), _aclnn_names(package))
    wheel = next(package.parent.glob("torch_npu-*.dist-info")).name
    key = hashlib.sha256(repr((sources, wheel, _FLAGS, Path(__file__).read_text())).encode()).hexdigest()[:16]
    folder = _CACHE / key
    if folder.exists():
        return folder
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the simulated CANN needs g++; apt-get install g++")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        work = Path(temporary) / "build"
        work.mkdir()
        for name, text in sources.items():
            (work / name).write_text(text)
        _build_in(work, compiler, package)
        try:
            work.rename(folder)
        except OSError:
            if not folder.exists():  # another process was faster
                raise
    return folder


def opapi_source(kernels: list[Kernel], names: tuple[str, ...]) -> str:
    """Give the source of ``libopapi.so``: each aclnn function, with the simulated ones' true signatures."""
    lines = ['#include "call.hpp"', '#define API extern "C" __attribute__((visibility("default")))', ""]
    for number, one in enumerate(kernels):
        kinds = [kind for kind, _ in one.parameters]
        parameters = [f"{_C_TYPES.get(kind, 'const void*')} a{i}" for i, kind in enumerate(kinds)]
        calls = "".join(f".{_packer(kind)}(a{i})" for i, kind in enumerate(kinds))
        lines.append(
            f"API int aclnn{one.name}GetWorkspaceSize({', '.join(parameters)}, uint64_t* bytes, void** executor) "
            f"{{ return ascend_sim::prepare(ascend_sim::Call({number}){calls}, bytes, executor); }}"
        )
        lines.append(
            f"API int aclnn{one.name}GetMaxWorkspaceSize({', '.join(parameters)}, uint64_t* bytes, void** executor) "
            "{ *bytes = 0; *executor = nullptr; return 0; }"
        )
        lines.append(
            f"API int aclnn{one.name}(void*, uint64_t, void* executor, void* stream) "
            "{ return ascend_sim::launch(executor, stream); }"
        )
    simulated = {f"aclnn{one.name}" for one in kernels}
    for name in names:
        if name not in simulated:
            lines.append(f'API int {name}GetWorkspaceSize() {{ return ascend_sim::not_simulated("{name}"); }}')
            lines.append(f'API int {name}() {{ return ascend_sim::not_simulated("{name}"); }}')
    return "\n".join(lines) + "\n"


def _packer(kind: str) -> str:
    if kind in ("double", "float"):
        return "real"
    if kind == "string":
        return "text"
    return "integer" if kind in _C_TYPES else "object"


def _build_in(work: Path, compiler: str, package: Path) -> None:
    def compile_library(name: str, *arguments: str) -> None:
        command = [compiler, *_FLAGS, f"-Wl,-soname,{name}", "-o", name, *arguments, "-Wl,-rpath,$ORIGIN", "-L."]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot build {name}:\n{done.stderr[-4000:]}")

    for name in ("runtime", "compiler", "opp"):  # an installed CANN has these
        (work / name).mkdir()
    (work / "empty.cpp").write_text("")
    for name in _EMPTY:
        compile_library(name, "empty.cpp")
    (work / "rest.cpp").write_text(_rest_source(work, package))
    compile_library("libascendcl.so", "runtime.cpp", "stream.cpp", "rest.cpp")
    compile_library("libacl_op_compiler.so", "compiler.cpp")
    compile_library("libnnopbase.so", "base.cpp")
    compile_library("libhccl.so", "hccl.cpp", "-lascendcl")
    compile_library("libopapi.so", "opapi.cpp", "call.cpp", "-lascendcl")


def _rest_source(work: Path, package: Path) -> str:
    """Give functions that refuse, for whatever else the wheel wants of CANN."""
    simulated = set(re.findall(r"^API [\w ]+?\*?\s?(\w+)\(", "".join(p.read_text() for p in work.glob("*.cpp")), re.M))
    wheel = [*package.glob("_C*.so"), *(package / "lib").glob("*.so")]
    given = set().union(*(_symbols(path, "--defined-only") for path in [*wheel, *_providers(package)]))
    wanted = set().union(*(_symbols(path, "--undefined-only", " U ") for path in wheel)) - given - simulated
    return "".join(
        f'extern "C" __attribute__((visibility("default"))) int {name}() '
        f"{{ return {0 if name.startswith(_HARMLESS) else _UNSUPPORTED}; }}\n"
        for name in sorted(wanted)
        if not name.startswith(("Py", "_Py"))
    )


def _providers(package: Path) -> list[Path]:
    """Give the libraries that the wheel finds without CANN: torch's and the system's."""
    shown = subprocess.run(
        ["ldd", package / "lib" / "libtorch_npu.so"], capture_output=True, text=True, check=False
    ).stdout
    system = [Path(found) for found in re.findall(r"(/\S+\.so\S*) \(", shown)]
    return [*(_package("torch") / "lib").glob("*.so*"), *system]


def _symbols(path: Path, which: str, kind: str = " ") -> set[str]:
    done = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=False)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if kind in line}


def _aclnn_names(package: Path) -> tuple[str, ...]:
    content = (package / "lib" / "libtorch_npu.so").read_bytes()
    found = {name.decode() for name in re.findall(rb"aclnn[A-Z][A-Za-z0-9_]+", content)}
    plain = {name.removesuffix("GetWorkspaceSize").removesuffix("GetMaxWorkspaceSize") for name in found}
    return tuple(sorted(plain - set(_ABSENT)))


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the simulated CANN needs {name}; run `make test-ascend`")
    return Path(spec.origin).parent


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
