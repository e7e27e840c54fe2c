"""Compile `kernels.c` with the machine's C compiler, once per machine type, and call its functions.

The compiled library is kept in the user's cache: $XDG_CACHE_HOME/simbal/native or ~/.cache/simbal/native.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-std=gnu17", "-ffp-contract=fast", "-shared", "-fPIC")
# tried in this order: Clang on Arm has -mcpu=native instead of -march=native, and Apple's Clang has no OpenMP
TARGETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
MEASURED_WIDTH = 8  # floats in a vector of AVX2, the narrowest with which the kernels were compared with torch
FAILURES = {
    1: (MemoryError, "not enough memory for a CPU kernel"),
    2: (RuntimeError, "a target is not in the vocabulary"),
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message is the compiler's first error."""


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernels cannot run with this device and dtype, or None; compiles them if needed."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"it needs fp32 on a CPU, not {dtype} on {device.type}: set trainer.precision=32-true"
    try:
        load_library()
    except BuildError as error:
        return str(error)
    return None


def unmeasured() -> str | None:
    """Return why `auto` does not choose the kernels although they can run here, or None."""
    if vector_width() >= MEASURED_WIDTH:
        return None
    return f"native was not measured with vectors of {vector_width()} floats"


def call(function: str, *arguments: Tensor | float) -> None:
    """Call a function of `kernels.c` with contiguous tensors and numbers, and the number of threads that torch uses.

    Raises:
        MemoryError: not enough memory.
        RuntimeError: a target of the head is not in the vocabulary.
    """
    converted = [
        ctypes.c_void_p(value.data_ptr())
        if isinstance(value, Tensor)
        else ctypes.c_float(value) if isinstance(value, float) else ctypes.c_long(value)
        for value in arguments
    ]  # fmt: skip
    if status := load_library()[function](*converted, ctypes.c_int(torch.get_num_threads())):
        kind, message = FAILURES[status]
        raise kind(message)


def vector_width() -> int:
    """Return the number of floats in a vector of the compiled kernels."""
    return int(load_library().vector_width())


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, compiled if the cache does not have it.

    Raises:
        BuildError: no compiler, a compiler error, or a cache that cannot be written.
    """
    try:
        path = library_path()
        if not path.exists():
            compile_library(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"its kernels cannot be compiled or loaded: {error}") from None


def library_path() -> Path:
    """Return the library's path in the cache; its name depends on the source, the flags and the CPU's features."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else [platform.processor()]
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), lines[0])
    parts = (SOURCE.read_text(encoding="utf-8"), str((FLAGS, TARGETS)), platform.platform(), features)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "simbal" / "native" / f"kernels-{digest[:16]}.so"


def compile_library(path: Path) -> None:
    """Compile the kernels to `path`. Several processes may do so at once: each renames its own complete file.

    Raises:
        BuildError: no compiler, or a compiler error.
        OSError: the folder cannot be written.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise BuildError("its kernels need a C compiler, and cc is not in PATH: install gcc or clang")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        for target in TARGETS:
            command = [compiler, *FLAGS, *target, str(SOURCE), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                built.replace(path)
                return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
    raise BuildError(f"{compiler} cannot compile its kernels: {errors[0]}")
