"""Cost of preparing and loading text: python -m benchmarks.preparation [--vocab N]

Each measurement runs in a separate process with one thread on one core; the best of three rounds is shown. The text is
data=pysource.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from simbal.config.schema import DataConfig

CONF = Path(__file__).parents[1] / "conf" / "data"
ROUNDS = 3
SMALL_FILES, LARGE = 378, 240_000_000  # of about 20 kB each; bytes of text in one .jsonl.zst
SEQ_LEN, BATCH, BATCHES = 1024, 16, 4000
Figures = dict[str, float]


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192, help="number of token ids; 100277 for all (default: 8192)")
    vocab = parser.parse_args().vocab
    with tempfile.TemporaryDirectory(prefix="preparation-") as name:
        folder = Path(name)
        alone(write_corpora, folder)
        small = {count: best(prepare_files, folder, f"small/{count}/*.txt", vocab) for count in (250, 500, 1000)}
        print("| small files | CPU seconds of `prepare` |\n|---:|---:|")
        for count, figures in small.items():
            print(f"| {count} | {figures['cpu']:.2f} |")
        print(f"\nCPU time, 1,000 files / 500 files: {small[1000]['cpu'] / small[500]['cpu']:.2f}\n")
        print(
            "| what | CPU s | wall s | Mtok per CPU s | of tiktoken alone, CPU | wall |\n|---|---:|---:|---:|---:|---:|"
        )
        for what, files in {
            f"{SMALL_FILES} small .txt": f"small/{SMALL_FILES}/*.txt",
            "large .jsonl.zst": "large.jsonl.zst",
        }.items():
            tiktoken = best(encode_files, folder, files, vocab)
            prepared = best(prepare_files, folder, files, vocab)
            print_row(f"tiktoken, {what}", tiktoken, tiktoken)
            print_row(f"`prepare`, {what}", prepared, tiktoken)
        loading = best(load_batches, folder)
        print_row(f"`TokenData`, S = {SEQ_LEN}, batch of {BATCH}", loading, loading)


def print_row(what: str, figures: Figures, tiktoken: Figures) -> None:
    """Print one row of the second table."""
    cpu, wall, tokens = figures["cpu"], figures["wall"], figures["tokens"]
    shares = [tiktoken[clock] / tiktoken["tokens"] * tokens / figures[clock] for clock in ("cpu", "wall")]
    print(
        f"| {what} | {cpu:.2f} | {wall:.2f} | {tokens / cpu / 1e6:.2f} | {shares[0]:.2f} | {shares[1]:.2f} |",
        flush=True,
    )


def best(function: Callable[..., Figures], *arguments: Any) -> Figures:
    """Return the minimum CPU and wall time over a few rounds, because other programs can only slow a round down."""
    rounds = [alone(function, *arguments) for _ in range(ROUNDS)]
    return {key: min(figures[key] for figures in rounds) for key in rounds[0]}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a new process on one core."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(pinned, function, arguments).result()


def pinned(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Bind the process to one core and call `function`."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return function(*arguments)


def write_corpora(folder: Path) -> None:
    """Write folders of small .txt files and one large .jsonl.zst file."""
    import zstandard

    texts = package_texts()
    for count in (250, 500, 1000, SMALL_FILES):
        (folder / "small" / str(count)).mkdir(parents=True)
        for number, text in enumerate(islice(texts, count)):
            (folder / "small" / str(count) / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    with zstandard.open(folder / "large.jsonl.zst", "wt", encoding="utf-8") as file:
        written = 0
        for number, text in enumerate(cycle(texts)):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
            written += len(text.encode())
            if written >= LARGE:
                break


def package_texts() -> list[str]:
    """Return the documents of data=pysource."""
    from simbal.data.prepare import open_source

    source = open_source(keys("pysource"))
    return [document.content.decode() for name in source.inputs() for document in source.read(name, Counter())]


def keys(source: str, **changed: Any) -> "DataConfig":
    """Return the keys of `conf/data/<source>.yaml`, updated with `changed`."""
    from simbal.config.compose import validate_data

    return validate_data({**yaml.safe_load((CONF / f"{source}.yaml").read_text(encoding="utf-8")), **changed})


def encode_files(folder: Path, files: str, vocab_size: int) -> Figures:
    """Encode texts in memory with tiktoken, one document at a time. Loading the tokenizer counts, as in `prepare`."""
    import zstandard

    from simbal.data.tokenizer import load_tokenizer

    if files.endswith(".zst"):
        with zstandard.open(folder / files, "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
    else:
        texts = [path.read_text(encoding="utf-8") for path in folder.glob(files)]
    with clock() as figures:
        encoding = load_tokenizer(vocab_size).encoding
        figures["tokens"] = sum(len(encoding.encode_to_numpy(text, disallowed_special=())) + 1 for text in texts)
    return figures


def prepare_files(folder: Path, files: str, vocab_size: int) -> Figures:
    """Prepare a store in `folder/cache` like `python prepare.py`, without the time of imports."""
    from simbal.data.prepare import prepare

    shutil.rmtree(folder / "cache", ignore_errors=True)
    cache = str(folder / "cache")
    data = keys("files", files=str(folder / files), cache_dir=cache, vocab_size=vocab_size, threads=1)
    with clock() as figures:
        store = prepare(data, progress=False)
    return figures | {"tokens": sum(split["tokens"] for split in store.meta["splits"].values())}


def load_batches(folder: Path) -> Figures:
    """Read training batches from the last store, as a run does."""
    from simbal.data.loader import TokenData
    from simbal.data.store import Store

    store = Store.open(next(folder.glob("cache/files-*")))
    sizes = {"seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH, "max_steps": BATCHES}
    batches = TokenData(store, seed=0, validation_tokens=None, **sizes).train_dataloader()
    with clock() as figures:
        figures["tokens"] = sum(batch.shape[0] * SEQ_LEN for batch in batches)
    return figures


class clock:  # noqa: N801 - used like a function
    """Wall time and CPU time (all threads) of the `with` block, in seconds."""

    def __enter__(self) -> Figures:
        self.figures: Figures = {}
        self.started = time.perf_counter(), time.process_time()
        return self.figures

    def __exit__(self, *_: object) -> None:
        self.figures["wall"] = time.perf_counter() - self.started[0]
        self.figures["cpu"] = time.process_time() - self.started[1]


if __name__ == "__main__":
    main()
