"""Compiles a C++ source into a shared library once and keeps it in the user's cache.

It knows nothing of PyTorch or of what is computed: a source file goes in, the path of a library comes out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_SECONDS = 120.0

BASE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-w")
# In order of preference: some compilers know one of the two on some processors, and some know neither.
TUNING_FLAGS = (("-march=native",), ("-mcpu=native",), ())

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class CompileError(Exception):
    """The source cannot be compiled here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: the command that starts it, and what it says of its version."""

    command: tuple[str, ...]
    version: str


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """Give the compiler of ``$CXX``, else the first of c++, g++, clang++ on ``$PATH``.

    Raises:
        CompileError: There is none, or it does not start.
    """
    wanted = [shlex.split(environ["CXX"])] if environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    for command in wanted:
        program = shutil.which(command[0], path=environ.get("PATH", ""))
        if program is not None:
            command = [program, *command[1:]]
            return Compiler(tuple(command), _run([*command, "--version"], timeout_seconds=10.0))
    names = ", ".join(command[0] for command in wanted)
    raise CompileError(f"no C++ compiler: looked for {names} on PATH; install g++ or point CXX at a compiler")


def library_of(source: Path, environ: Mapping[str, str]) -> Path:
    """Give the library compiled from ``source``, from the cache if it is there and intact.

    The cache is ``$XDG_CACHE_HOME/runnerd/kernels``, by default below ``~/.cache``. A name there holds two hashes: of
    all that decides what the compiler makes, and of the library itself. So one rename publishes a library, processes
    may compile at the same time, and a damaged file is told from an intact one before it is loaded.

    Raises:
        CompileError: It cannot be compiled.
        OSError: The cache cannot be written.
    """
    compiler = find_compiler(environ)
    recipe = [*_texts(source), *compiler.command, compiler.version, *BASE_FLAGS, str(TUNING_FLAGS), _processor()]
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:24]
    cache = _cache_folder(environ)
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    for library in sorted(cache.glob(f"{key}-*.so")):
        if library.name == _name(key, library.read_bytes()):
            return library
        logger.warning("%s is damaged; compiling it anew", library)
        library.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f"{key}-") as folder:
        compiled = Path(folder) / "library.so"
        _compile(compiler, source, compiled)
        library = cache / _name(key, compiled.read_bytes())
        compiled.replace(library)
    return library


def _texts(source: Path) -> list[str]:
    """Give the text of the source and of all of ours that it includes."""
    found: dict[Path, str] = {}
    wanted = [source.resolve()]
    while wanted:
        path = wanted.pop()
        if path not in found:
            found[path] = path.read_text()
            wanted += [(path.parent / name).resolve() for name in _INCLUDE.findall(found[path])]
    return [found[path] for path in sorted(found)]


def _compile(compiler: Compiler, source: Path, target: Path) -> None:
    failure: CompileError | None = None
    for tuning in TUNING_FLAGS:
        command = [*compiler.command, *BASE_FLAGS, *tuning, str(source), "-o", str(target)]
        try:
            _run(command, timeout_seconds=COMPILE_TIMEOUT_SECONDS)
        except CompileError as error:
            failure = error
            continue
        logger.info("compiled %s with %s", source.name, shlex.join(command))
        return
    assert failure is not None
    raise failure


def _run(command: list[str], *, timeout_seconds: float) -> str:
    # A compiler starts others; a session of its own lets a time-out end them all.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise CompileError(f"{shlex.join(command)} took longer than {timeout_seconds:g} s") from error
    if process.returncode != 0:
        raise CompileError(f"{shlex.join(command)} failed with exit code {process.returncode}:\n{output.strip()}")
    return output


def _cache_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "runnerd" / "kernels"


def _name(key: str, library: bytes) -> str:
    return f"{key}-{hashlib.sha256(library).hexdigest()[:24]}.so"


def _processor() -> str:
    """Name what ``-march=native`` looks at: the instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part", "isa"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(described)])
