"""Memory that was freed: that of a step stays with the process for the next, that of a large model's loading does not.

glibc gives large blocks back to the kernel, which maps and clears their pages anew at the next use: 8,600 page faults a
step at `model=tiny`, a fifth of its time on a virtual machine.
Reference: mallopt(3), malloc_trim(3).
"""

import ctypes

# parameter of mallopt: value
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 2**31 - 1), (-3, 2**30)  # bytes: never shrink; map blocks of 1 GiB only


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for this process from now on; with another libc, do nothing.

    The process then holds the most that it ever needed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Give all freed memory back to the kernel; with another libc, do nothing."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
