"""The C kernels are compiled once per machine type; without a compiler, torch's operators replace them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from simbal.errors import UserError
from simbal.experts.select import select_backend
from simbal.native import library
from tests.compiler import needs_compiler

CPU = torch.device("cpu")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """No compiled kernels yet; returns the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield tmp_path / "cache"
    library.load_library.cache_clear()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """`compiler(script)` replaces cc by a shell script; returns the file with the arguments of each call."""

    def replace(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "cc").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        (folder / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return tmp_path / "calls"

    return replace


def test_without_a_compiler_auto_uses_torch_and_a_named_native_is_an_error(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = select_backend("auto", CPU, torch.float32, 64, 64)
    assert choice.name == "torch"
    assert "native cannot run here: its kernels need a C compiler, and cc is not in PATH" in choice.reason
    with pytest.raises(UserError, match=r"experts.backend=native cannot run here: .*cc is not in PATH"):
        select_backend("native", CPU, torch.float32, 64, 64)


def test_the_error_has_the_compilers_words(empty_cache, compiler):
    compiler("echo 'kernels.c:7: error: unknown type' >&2; exit 1")
    with pytest.raises(library.BuildError, match=r"cc cannot compile its kernels: kernels.c:7: error: unknown type"):
        library.load_library()


def test_an_unwritable_cache_and_a_damaged_library_are_build_errors(empty_cache, compiler):
    compiler('for out; do [ "$before" = -o ] && echo damaged > "$out"; before="$out"; done')
    empty_cache.write_text("a file, not a folder")
    with pytest.raises(library.BuildError, match="Not a directory"):
        library.load_library()
    empty_cache.unlink()
    with pytest.raises(library.BuildError, match="cannot be compiled or loaded"):
        library.load_library()


def test_a_compiler_without_openmp_or_native_targets_is_enough(empty_cache, compiler):
    calls = compiler(
        'case "$*" in *-fopenmp*|*=native*) exit 1;; esac\n'
        'for out; do [ "$before" = -o ] && echo built > "$out"; before="$out"; done'
    )
    library.compile_library(library.library_path())
    assert library.library_path().read_text() == "built\n"
    assert len(calls.read_text().splitlines()) == len(library.TARGETS)


def test_the_file_name_depends_on_the_source_and_the_flags(empty_cache, monkeypatch, tmp_path):
    names = {library.library_path()}
    monkeypatch.setattr(library, "FLAGS", ("-O0",))
    names.add(library.library_path())
    (tmp_path / "kernels.c").write_text("int other;")
    monkeypatch.setattr(library, "SOURCE", tmp_path / "kernels.c")
    names.add(library.library_path())
    assert len(names) == 3
    assert {name.parent for name in names} == {empty_cache / "simbal" / "native"}


def test_processes_that_compile_at_once_leave_one_complete_library(empty_cache, compiler):
    compiler('for out; do [ "$before" = -o ] && { sleep 0.1; echo built > "$out"; }; before="$out"; done')
    path = library.library_path()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: library.compile_library(path), range(4)))
    assert path.read_text() == "built\n"
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.slow
@needs_compiler
def test_sanitizers_find_no_invalid_memory_access_and_no_undefined_behaviour(tmp_path):
    runtime = subprocess.check_output(["cc", "-print-file-name=libasan.so"], text=True).strip()
    if not Path(runtime).is_absolute():
        pytest.skip("this compiler has no sanitizers")
    environment = os.environ | {
        "LD_PRELOAD": runtime, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "2",
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1",
    }  # fmt: skip
    program = Path(__file__).with_name("sanitized.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all kernels ran" in done.stdout
