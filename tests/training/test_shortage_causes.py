"""What a run was short of is told from the errors that torch and the system raise."""

import errno
import os
from pathlib import Path

import pytest
import torch

from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk
from simbal.training.shortage import Shortage, shortage, smaller_micro_batches

CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "536870912 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB"
SMALLER = "set trainer.micro_batch=4, which makes the same steps in smaller parts"

REMEDIES = {
    errno.ENOSPC: "free some space, or choose another output_dir=",
    errno.EDQUOT: "free some space, or choose another output_dir=",
    errno.EROFS: "choose another output_dir=",
    errno.EACCES: "choose another output_dir=",
    errno.EPERM: "choose another output_dir=",
    errno.ENOTDIR: "choose another output_dir=",
    errno.EFBIG: "allow longer files with `ulimit -f`",
}


def of(error, micro_batch=8):
    return shortage(error, Path("outputs/x"), micro_batch, 8)


def hidden(error, *, explicit):
    """`error` behind another, as its cause or as what was being handled."""
    try:
        try:
            raise error
        except type(error) as inner:
            raise RuntimeError("unexpected pos 704 vs 598") from (inner if explicit else None)
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), f"the computer ran out of memory with trainer.micro_batch=8: {SMALLER}"),
        (
            RuntimeError(CPU_SAYS),
            "the computer ran out of memory with trainer.micro_batch=8, when 512.0 MiB more were asked for: " + SMALLER,
        ),
        (RuntimeError("std::bad_alloc"), f"the computer ran out of memory with trainer.micro_batch=8: {SMALLER}"),
        (
            OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
            f"the computer ran out of memory with trainer.micro_batch=8: {SMALLER}",
        ),
        (
            torch.OutOfMemoryError(CUDA_SAYS),
            f"the GPU ran out of memory with trainer.micro_batch=8, when 2.50 GiB more were asked for: {SMALLER}",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            f"the GPU ran out of memory with trainer.micro_batch=8: {SMALLER}",
        ),
    ],
)
def test_want_of_memory_names_the_next_smaller_micro_batch(error, sentence):
    assert of(error) == Shortage("memory", sentence)


def test_the_smallest_micro_batch_is_told_to_shorten_the_sequences_or_the_model():
    assert of(MemoryError(), 1).sentence.endswith(
        "use a smaller data.seq_len or a smaller model, as no micro-batch is smaller"
    )
    assert smaller_micro_batches(12, 24) == [8, 6, 4, 3, 2, 1]
    assert smaller_micro_batches(1, 24) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_told_of_ulimit(number):
    found = of(OSError(number, os.strerror(number), "a.bin"))
    assert found == Shortage("open files", "too many open files to open a.bin: allow more with `ulimit -n`")


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("number", "remedy"), REMEDIES.items())
def test_a_disk_that_refuses_is_found_behind_the_error_that_hides_it(number, remedy, explicit):
    found = of(hidden(OSError(number, os.strerror(number)), explicit=explicit))
    said = f"cannot write outputs/x: {os.strerror(number)}; {remedy}"
    assert found == Shortage("disk", said)


def test_what_the_disk_has_been_said_to_refuse_is_not_said_anew():
    with pytest.raises(UserError) as refused, refusals_of_disk(Path("elsewhere")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    found = of(refused.value)
    assert (found.cause, found.sentence) == ("disk", str(refused.value))
    assert "elsewhere" in found.sentence


def test_other_failures_are_no_shortage():
    for error in (RuntimeError("the loss is nan"), FileNotFoundError(errno.ENOENT, "No such file"), UserError("no")):
        assert of(error) is None
    assert of(hidden(ValueError("bad"), explicit=True)) is None
