"""Memory and time of measuring a model with a billion parameters: quality, routing and PES on 2,048 tokens.

    python -m benchmarks.host_memory            # 2 GB of disk and one to two minutes on two cores

Writes a random OLMoE to a folder and measures it with `evaluate.py hf=` in a separate process. Prints the peak resident
memory of that process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANALYSES = ("quality", "routing", "redundancy")
TOKENS = 2048
IDS = 4096  # token ids of the tokenizer; the embedding is as large as OLMoE's
SHAPE = {
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 9, "num_experts": 64,
    "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048,
}  # fmt: skip


def write_model(folder: Path, dtype: str) -> int:
    """Write a random model with its tokenizer and return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from simbal.data.tokenizer import load_tokenizer
    from simbal.hf.export import write_tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_dtype(getattr(torch, dtype))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **SHAPE))
    model.save_pretrained(folder)
    write_tokenizer(load_tokenizer(IDS), TOKENS, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measured(command: list[str], place: str) -> float:
    """Run a command and return its peak resident memory in GB."""
    process = subprocess.Popen(command, cwd=place)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    return used.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Write the model, measure it and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the weights")
    parser.add_argument("--dtype", default="auto", help="dtype= of evaluate.py")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        print(f"{write_model(args.write, args.stored):,} parameters in {args.stored}")
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "olmoe")
        own = [sys.executable, "-m", "benchmarks.host_memory", f"--write={folder}", f"--stored={args.stored}"]
        subprocess.run(own, check=True)
        keys = [f"analysis.{name}.{key}" for name in ANALYSES for key in (f"tokens={TOKENS}", "batch_size=1")]
        asked = [f"hf={folder}", "data=pysource", f"dtype={args.dtype}", f"analysis=[{','.join(ANALYSES)}]", *keys]
        peak = measured([sys.executable, str(ROOT / "evaluate.py"), *asked], place)
        for name in ANALYSES:
            found = json.loads(Path(place, f"outputs/models/olmoe/analysis/{name}.json").read_text())
            print(f"{name}: {found['seconds']:.1f} s in {found['precision']['analyzed']}, {found['tokens']:,} tokens")
        print(f"peak resident memory: {peak:.2f} GB")


if __name__ == "__main__":
    main()
