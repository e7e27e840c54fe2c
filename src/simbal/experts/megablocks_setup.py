"""Install Triton for the installed torch, and MegaBlocks without compiling its CUDA extension: `make setup-gpu`.

Neither can be an ordinary dependency: MegaBlocks 0.10.0 pins torch < 2.7.1 and numpy < 2.1, hence --no-deps and
--no-build-isolation. With a CUDA build of torch and a CUDA toolkit, its setup.py compiles an extension, which fails
under CUDA 13, and no environment variable disables this (torch finds any nvcc). So the build sees a fake torch without
CUDA. The kernels used here are Triton's and do not need the extension.

To compile the extension, remove the argument `debug_synchronous` from csrc/cumsum.h of the source package and run `pip
install --no-deps --no-build-isolation .` in it.
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
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1"}  # for CPU builds of torch, which do not require Triton


def triton_for_torch() -> str:
    """Return the version of Triton that the installed torch, or its CUDA build of the same version, requires."""
    for requirement in importlib.metadata.requires("torch") or []:
        if found := re.match(r"triton==([\w.]+)", requirement):
            return found[1]
    version = importlib.metadata.version("torch")
    minor = ".".join(version.split(".")[:2])
    if minor not in TRITON_OF_TORCH:
        raise UserError(f"the version of Triton for torch {version} is unknown: install Triton yourself, then rerun")
    return TRITON_OF_TORCH[minor]


def write_torch_without_cuda(folder: Path) -> None:
    """Write a fake package torch without CUDA, with only the modules that MegaBlocks' setup.py imports."""
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text('__version__ = "0"\n')
    (folder / "torch" / "utils" / "__init__.py").touch()
    cuda = "CUDA_HOME = BuildExtension = CUDAExtension = None\n"
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(cuda)


def pip(*arguments: str, python_path: str | None = None) -> None:
    """Run `pip install` in this environment.

    Raises:
        UserError: it fails.
    """
    extra = {} if python_path is None else {"PYTHONPATH": python_path}
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(command, env=os.environ | extra, check=False).returncode:
        raise UserError(f"pip install {' '.join(arguments)} failed, see above")


def main() -> None:
    """Install Triton if it is missing, and MegaBlocks without its extension."""
    try:
        importlib.metadata.version("triton")  # a CUDA build of torch requires the matching version
    except importlib.metadata.PackageNotFoundError:
        pip("--no-deps", f"triton=={triton_for_torch()}")
    pip("numpy", "packaging", "setuptools")
    with TemporaryDirectory() as folder:
        write_torch_without_cuda(Path(folder))
        # no cache: it may contain a wheel compiled for another torch
        pip("--no-cache-dir", "--no-deps", "--no-build-isolation", *PACKAGES, python_path=folder)
    print(f"ready: triton {importlib.metadata.version('triton')}, {', '.join(PACKAGES)}")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
