"""Installs the Triton that fits the installed torch, and MegaBlocks without compiling: `make setup-gpu`.

Neither can be an ordinary dependency: MegaBlocks 0.10.0 pins torch < 2.7.1 and numpy < 2.1, hence --no-deps and
--no-build-isolation. With a CUDA torch and a toolkit its setup.py compiles an extension, which fails under CUDA 13, and
no environment variable prevents it (torch finds any nvcc). So its build is shown a torch without CUDA. The kernels are
Triton's, and `megablocks_ops` stands in for the extension.

To compile it instead, drop the argument `debug_synchronous` from csrc/cumsum.h of the source package, and run `pip
install --no-deps --no-build-isolation .` there; `megablocks_ops` is then found and used.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from simbal.errors import UserError, exit_on_user_error

PACKAGES = ("megablocks==0.10.0", "stanford-stk==0.7.1")
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1"}  # where torch is a build for the CPU, which does not say


def triton_for_torch() -> str:
    """Return the version of Triton that torch requires, or that its CUDA build of the same version does."""
    for requirement in importlib.metadata.requires("torch") or []:
        if found := re.match(r"triton==([\w.]+)", requirement):
            return found[1]
    version = importlib.metadata.version("torch")
    minor = ".".join(version.split(".")[:2])
    if minor not in TRITON_OF_TORCH:
        raise UserError(f"no Triton is known to fit torch {version}: install one by hand, then run this again")
    return TRITON_OF_TORCH[minor]


def write_torch_without_cuda(folder: Path) -> None:
    """Write a fake package torch without CUDA, with all that MegaBlocks' setup.py reads of it."""
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text('__version__ = "0"\n')
    (folder / "torch" / "utils" / "__init__.py").touch()
    cuda = "CUDA_HOME = BuildExtension = CUDAExtension = None\n"
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(cuda)


def pip(*arguments: str, python_path: str | None = None) -> None:
    """Run `pip install` in this environment; `UserError` if it fails."""
    extra = {} if python_path is None else {"PYTHONPATH": python_path}
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(command, env=os.environ | extra, check=False).returncode:
        raise UserError(f"pip install {' '.join(arguments)} failed, see above")


def main() -> None:
    """Install Triton if it is missing, and MegaBlocks without its extension."""
    try:
        importlib.metadata.version("triton")  # beside a CUDA torch it is there, and right
    except importlib.metadata.PackageNotFoundError:
        pip("--no-deps", f"triton=={triton_for_torch()}")
    pip("numpy", "packaging", "setuptools")
    with TemporaryDirectory() as folder:
        write_torch_without_cuda(Path(folder))
        # no cache: it may hold a wheel with an extension compiled for another torch
        pip("--no-cache-dir", "--no-deps", "--no-build-isolation", *PACKAGES, python_path=folder)
    print(f"ready: triton {importlib.metadata.version('triton')}, {', '.join(PACKAGES)}")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
