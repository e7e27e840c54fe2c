"""Tests of the C kernels are skipped only where no C compiler is installed; if compiling fails, they fail."""

import shutil

import pytest

HAS_COMPILER = shutil.which("cc") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
