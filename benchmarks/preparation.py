"""Measures what preparing and loading text cost: python -m benchmarks.preparation [--text GLOB] [--vocab N] [--large]

Every measurement has a process of its own, pinned to one or two cores; the best of a few rounds is shown, as another
program can only slow one. The text is that of installed packages, or of GLOB; it is written as .jsonl.zst first. Peak
memory is the largest resident set of a `prepare`, for corpora of different sizes that hold out the same 1 MB.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from simbal.config.schema import DataConfig

CONF = Path(__file__).parents[1] / "conf" / "data"
ROUNDS = 3
HELD_OUT = 1 << 20  # bytes of text
MEASURED = 240_000_000  # for the speeds: reading the token table, 0.1 to 0.3 s, should not count for much
VERIFIED, REPEATED = 200_000_000, 1000  # tokens of a store that is verified; how often it is opened again
SEQ_LEN, BATCH, BATCHES = 1024, 16, 4000
Figures = dict[str, float]


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", metavar="GLOB", help="your own .txt, .jsonl ... instead of the packages' sources")
    parser.add_argument("--vocab", type=int, default=8192, help="size of the vocabulary, 100277 for all (8192)")
    parser.add_argument("--large", action="store_true", help="measure memory for 2 GB too, in several minutes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preparation-") as folder:
        corpus = alone(write_corpus, Path(folder), arguments.text, MEASURED)
        print(f"{corpus['bytes'] / 1e6:.1f} MB of text, {arguments.vocab} ids, {os.cpu_count()} cores\n")
        print_speeds(Path(folder), arguments.vocab)
        print_verification(Path(folder), arguments.vocab)
        print("\n| MB of text | peak MB of `prepare`, 2 threads |\n|---:|---:|")
        for megabytes in (20, 200, 2000) if arguments.large else (20, 200):
            alone(write_corpus, Path(folder), arguments.text, megabytes * 1_000_000)
            prepared = alone(prepare_corpus, Path(folder), arguments.vocab, 2, cores=2)
            print(f"| {megabytes} | {prepared['peak']:.0f} |", flush=True)


def print_speeds(folder: Path, vocab_size: int) -> None:
    """Print the speeds of tiktoken, `prepare`, checking and loading; they take turns, as the machine's speed drifts."""
    measurements: dict[str, Callable[[], Figures]] = {
        "tiktoken alone": lambda: alone(encode_corpus, folder, vocab_size),
        "`prepare`, 1 thread, 1 core": lambda: alone(prepare_corpus, folder, vocab_size, 1),
        "`prepare`, 2 threads, 2 cores": lambda: alone(prepare_corpus, folder, vocab_size, 2, cores=2),
        "`check`": lambda: alone(check_store, folder),
        f"`TokenData`, S = {SEQ_LEN}, batch of {BATCH}": lambda: alone(load_batches, folder),
    }
    rounds = [{name: measure() for name, measure in measurements.items()} for _ in range(ROUNDS)]
    print("| what | Mtok/s | Mtok per CPU second | MB/s of text |\n|---|---:|---:|---:|")
    best: dict[str, Figures] = {}
    for name in measurements:
        taken = [round_[name] for round_ in rounds]
        wall, cpu = (min(figures[clock] / figures["tokens"] for figures in taken) for clock in ("wall", "cpu"))
        best[name] = {"wall": wall, "cpu": cpu}
        per_token = taken[0]["bytes"] / taken[0]["tokens"]
        print(f"| {name} | {1e-6 / wall:.2f} | {1e-6 / cpu:.2f} | {1e-6 * per_token / wall:.1f} |")
    tiktoken, one, two, *_ = best.values()
    print(f"\n`prepare` with 1 thread / tiktoken alone, in tokens/s: {tiktoken['wall'] / one['wall']:.2f}", end="")
    print(f" ({tiktoken['cpu'] / one['cpu']:.2f} of CPU time)")
    print(f"`prepare` with 2 threads / 1 thread, in tokens/s: {one['wall'] / two['wall']:.2f}", flush=True)


def print_verification(folder: Path, vocab_size: int) -> None:
    """Print the time to open a store that is not verified yet on this machine, and one that is."""
    alone(write_store, folder, vocab_size)
    rounds = [alone(verify_store, folder) for _ in range(ROUNDS)]
    best = {name: min(figures[name] for figures in rounds) for name in ("wall", "cpu", "again", "peak")}
    print(f"\n| opening a store of {2e-9 * VERIFIED:.1f} GB | |\n|---|---:|")
    print(f"| the first time, seconds per GB, wall and CPU | {best['wall']:.2f}, {best['cpu']:.2f} |")
    print(f"| peak MB | {best['peak']:.0f} |")
    print(f"| again, microseconds | {1e6 * best['again']:.0f} |", flush=True)


def alone(function: Callable[..., Figures], *arguments: Any, cores: int = 1) -> Figures:
    """Call `function` in a new process on `cores` cores; adds `peak`, its largest resident set in MB."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(pinned, function, arguments, cores).result()


def pinned(function: Callable[..., Figures], arguments: tuple[Any, ...], cores: int) -> Figures:
    """Call `function` for `alone` in the new process, and add its peak."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < cores:
        raise SystemExit(f"{cores} cores are needed, {len(allowed)} are there")
    os.sched_setaffinity(0, set(allowed[-cores:]))
    figures = function(*arguments)
    return {**figures, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def write_corpus(folder: Path, text: str | None, size: int) -> Figures:
    """Write `train.jsonl.zst` with `size` bytes of text, repeated if need be, and 1 MB of other in `held_out`."""
    import zstandard

    documents = numbered_texts(text)
    for name, limit in (("held_out", HELD_OUT), ("train", size)):
        with zstandard.open(folder / f"{name}.jsonl.zst", "wt", encoding="utf-8") as file:
            written = 0
            for document in documents:
                file.write(json.dumps({"text": document}) + "\n")
                written += len(document.encode())
                if written >= limit:
                    break
    return {"bytes": written}


def numbered_texts(text: str | None) -> Iterator[str]:
    """Yield the documents of a source again and again; from the second time on a number keeps them different."""
    from simbal.data.store import open_source

    data = keys("pysource") if text is None else keys("files", files=text)
    number = 0
    for repetition in count():
        source = open_source(data)
        for unit in source.units():
            for document in source.read(unit, Counter()):
                content, number = document.content.decode(), number + 1
                yield f"{number} {content}" if repetition else content


def keys(source: str, **changed: Any) -> "DataConfig":
    """Return the keys of `conf/data/<source>.yaml`, some replaced."""
    from simbal.config.compose import checked_data

    return checked_data({**yaml.safe_load((CONF / f"{source}.yaml").read_text(encoding="utf-8")), **changed})


def encode_corpus(folder: Path, vocab_size: int) -> Figures:
    """Encode texts that are in memory by tiktoken in one thread, a document at a time."""
    import zstandard

    from simbal.data.tokenizer import load_tokenizer

    encoding = load_tokenizer(vocab_size).encoding
    with zstandard.open(folder / "train.jsonl.zst", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    with clock() as figures:
        figures["tokens"] = sum(len(encoding.encode_to_numpy(text, disallowed_special=())) + 1 for text in texts)
    return figures | {"bytes": sum(len(text.encode()) for text in texts)}


def prepare_corpus(folder: Path, vocab_size: int, threads: int) -> Figures:
    """Prepare a store in `folder/cache` from .jsonl.zst, as `python prepare.py` does; imports are not counted."""
    from simbal.data.store import prepare

    shutil.rmtree(folder / "cache", ignore_errors=True)
    files = {"files": str(folder / "train.jsonl.zst"), "validation_files": str(folder / "held_out.jsonl.zst")}
    data = keys("files", **files, cache_dir=str(folder / "cache"), vocab_size=vocab_size, threads=threads)
    with clock() as figures:
        store = prepare(data, progress=False)
    return figures | totals(store.meta)


def check_store(folder: Path) -> Figures:
    """Check the store that `prepare_corpus` left."""
    from simbal.data.check import check
    from simbal.data.store import Store

    store = Store.open(next(folder.glob("cache/files-*")))
    with clock() as figures:
        check(store, None)
    return figures | totals(store.meta)


def write_store(folder: Path, vocab_size: int) -> Figures:
    """Write `folder/store`: ids as rare as words are, in documents of 1,000 tokens or so."""
    import numpy as np

    from simbal.data.document import SPLITS
    from simbal.data.splits import facts_of
    from simbal.data.verification import fingerprints, write_meta

    random, eot = np.random.default_rng(0), vocab_size - 1
    byte_len = random.integers(1, 9, vocab_size).astype("<u2")
    facts, text = {}, dict.fromkeys(SPLITS, "")
    for split, size in zip(SPLITS, (VERIFIED, VERIFIED // 200), strict=True):
        (folder / "store" / split).mkdir(parents=True)
        ids = (random.zipf(1.2, 1 << 20) % eot).astype("<u2")  # drawn once, repeated
        ids = np.resize(ids, size)
        ids[random.integers(size, size=size // 1000)] = ids[-1] = eot
        ids.tofile(folder / "store" / split / "tokens.bin")
        (np.flatnonzero(ids == eot) + 1).astype("<u8").tofile(folder / "store" / split / "docs.idx")
        facts[split], _ = facts_of(folder / "store" / split, "<u2", byte_len, eot)
    byte_len.tofile(folder / "store" / "byte_len.bin")
    counts = {"documents": 0, "validation_documents": 0, "windows": 0, "validation_windows": 0}
    meta = {
        "dtype": "<u2", "vocab_size": vocab_size, "eot": eot, "source": {}, "tokenizer_sha256": None, "skipped": {},
        "byte_len_sha256": sha256(byte_len.data).hexdigest(), "surrogates_replaced": 0, "validation_overlap": counts,
        "splits": {split: asdict(facts[split]) | {"text_sha256": text[split]} for split in SPLITS}, "versions": {},
        "fingerprints": fingerprints(facts, text, vocab_size),
    }  # fmt: skip
    write_meta(folder / "store", meta)
    return {}


def verify_store(folder: Path) -> Figures:
    """Open it without a memory of it, and with one."""
    from simbal.data.store import Store
    from simbal.data.verification import MEMORY

    (folder / "store" / MEMORY).unlink(missing_ok=True)
    with clock() as figures:
        Store.verified(folder / "store", remember=True)
    gigabytes = 2e-9 * VERIFIED
    started = time.perf_counter()
    for _ in range(REPEATED):
        Store.verified(folder / "store", remember=True)
    again = (time.perf_counter() - started) / REPEATED
    return {"wall": figures["wall"] / gigabytes, "cpu": figures["cpu"] / gigabytes, "again": again}


def load_batches(folder: Path) -> Figures:
    """Read training batches of that store, as a run gets them."""
    from simbal.data.loader import TokenData
    from simbal.data.store import Store

    store = Store.open(next(folder.glob("cache/files-*")))
    sizes = {"seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH, "max_steps": BATCHES}
    batches = TokenData(store, seed=0, validation_tokens=None, **sizes).train_dataloader()
    with clock() as figures:
        figures["tokens"] = sum(batch.shape[0] * SEQ_LEN for batch in batches)
    stored = totals(store.meta)
    return figures | {"bytes": stored["bytes"] / stored["tokens"] * figures["tokens"]}


class clock:  # noqa: N801 - used like a function
    """Wall time and CPU time of all threads of what is done within, in seconds."""

    def __enter__(self) -> Figures:
        self.figures: Figures = {}
        self.started = time.perf_counter(), time.process_time()
        return self.figures

    def __exit__(self, *_: object) -> None:
        self.figures["wall"] = time.perf_counter() - self.started[0]
        self.figures["cpu"] = time.process_time() - self.started[1]


def totals(meta: dict[str, Any]) -> Figures:
    """Return the counts of both splits together."""
    return {name: sum(split[name] for split in meta["splits"].values()) for name in ("tokens", "bytes")}


if __name__ == "__main__":
    main()
