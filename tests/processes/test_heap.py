"""Memory that is freed is used again without page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from simbal.processes.heap import keep_freed_memory
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.ones(elements) for elements in (6_000_000, 2_000_000, 20_000_000)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(3):
    use()
print(use())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_blocks_of_a_step_are_used_again_without_page_faults() -> None:
    default, kept = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True).stdout)
        for how in ("default", "kept")
    )
    assert default > 10 * max(kept, 10)  # huge pages, where the kernel gives them, make the faults fewer
