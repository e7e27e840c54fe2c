"""Text to tokens on disk: python prepare.py data=files data.files=corpus.jsonl."""

import hydra
from omegaconf import DictConfig

from simbal.errors import exit_on_user_error


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    """Prepare the data of this config, unless they are, and say what they are."""
    from simbal.data.store import prepare
    from simbal.run_folder import RunSpec

    with exit_on_user_error():
        store = prepare(RunSpec.from_hydra(cfg).config["data"], progress=True)
    print(store.path)
    for split, counts in store.meta["splits"].items():
        per_token = counts["bytes"] / counts["tokens"]
        print(
            f"  {split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {per_token:.3f} bytes per token"
        )
    for reason, count in store.meta["skipped"].items():
        print(f"  skipped: {count:,} ({reason})")
    print("  fingerprints:", ", ".join(f"{kind} {digest[:12]}" for kind, digest in store.fingerprints.items()))


if __name__ == "__main__":
    main()
