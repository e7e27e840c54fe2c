"""The names that a slip may have meant: those that look like it, and what other tools call the same thing."""

import difflib
from collections.abc import Collection, Iterable

# our keys, with what other tools, papers and habit call them: the last part of a dotted name, in any spelling
OTHER_NAMES = {
    "seed": "seeds n_seeds num_seeds random_seed rng_seed",
    "name": "run_name exp_name experiment experiment_name",
    "output_dir": "out out_dir output outdir output_path save_dir log_dir logdir results_dir",
    "balancing": "method balance balancer aux_loss_type router_loss",
    "balancing.simbal.coef": "aux_loss_coef router_aux_loss_coef",
    "model.num_layers": "layers n_layers n_layer num_hidden_layers depth",
    "model.d_model": "dim width n_embd hidden hidden_dim hidden_size embed_dim",
    "model.num_heads": "heads n_heads n_head num_attention_heads",
    "model.num_kv_heads": "kv_heads n_kv_heads num_key_value_heads num_query_groups",
    "model.head_dim": "head_width head_size d_head kv_channels",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.d_expert": "d_ff ffn_dim ffn_hidden_size intermediate_size moe_intermediate_size expert_dim",
    "model.num_experts": "experts n_experts num_local_experts n_routed_experts expert_count",
    "model.num_shared_experts": "shared_experts num_shared n_shared_experts moe_num_shared_experts",
    "model.top_k": "k topk n_active_experts num_experts_per_tok num_experts_per_token",
    "data.files": "path paths file files dataset data_path data_dir data_file train_file train_files input corpus",
    "data.seq_len": "context ctx ctx_len context_length block_size max_length max_seq_len seq_length sequence_length",
    "data.vocab_size": "vocab n_vocab",
    "data.threads": "num_workers workers num_threads",
    "optim.lr": "lr learning_rate max_lr",
    "optim.weight_decay": "wd weight_decay",
    "optim.warmup_steps": "warmup warmup_iters warmup_steps num_warmup_steps",
    "optim.grad_clip": "clip clip_grad max_grad_norm gradient_clip_val gradient_clipping",
    "trainer.max_steps": "steps max_steps num_steps total_steps train_steps training_steps iters max_iters num_iters "
    "epochs n_epochs num_epochs max_epochs num_train_epochs",
    "trainer.global_batch": "bs batch batch_size global_batch_size train_batch_size",
    "trainer.micro_batch": "micro_batch_size microbatch device_batch_size per_device_batch_size "
    "per_device_train_batch_size grad_accum gradient_accumulation_steps accumulate_grad_batches",
    "trainer.devices": "gpu gpus n_gpus num_gpus ngpus num_devices nproc_per_node world_size",
    "trainer.accelerator": "device cuda",
    "trainer.precision": "dtype fp16 bf16 amp mixed_precision",
    "trainer.val_every": "eval_every eval_steps eval_interval val_interval val_check_interval",
    "trainer.log_every": "log_steps log_interval logging_steps log_every_n_steps",
    "trainer.ckpt_every": "save_every save_steps save_interval checkpoint_every",
    "run": "resume resume_from resume_from_checkpoint ckpt ckpt_path checkpoint",
    "to": "out out_dir output outdir output_path save_dir target",
    "hydra.launcher.n_jobs": "n_jobs jobs num_jobs parallel",
    "gpus": "gpu n_gpus num_gpus ngpus devices num_devices",
}
OTHER_OPTIONS = {"loss_free": "lf", "lossfree": "lf", "aux_free": "lf", "switch": "lbl", "load_balancing": "lbl",
                 "aux_loss": "lbl", "adam": "adamw", "text": "files", "tb": "tensorboard"}  # fmt: skip


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


MEANT = {(_plain(name), key) for key, names in OTHER_NAMES.items() for name in names.split()}


def meant(name: str, candidates: Collection[str]) -> str | None:
    """Return the candidate that other tools call `name`, of which the last part counts; None if there is none."""
    last = _plain(name.rpartition(".")[2])
    return next((key for key in candidates if (last, key) in MEANT), None)


def nearest(name: str, candidates: Collection[str]) -> str:
    """Return `; did you mean a or b?`, the likeliest first, or nothing."""
    key = meant(name, candidates) or OTHER_OPTIONS.get(name)
    likely = [key] if key and key in candidates else _alike(name, candidates)
    return f"; did you mean {' or '.join(likely)}?" if likely else ""


def _alike(name: str, candidates: Iterable[str]) -> list[str]:
    likeness = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = max(likeness.values(), default=0.0)
    likely = sorted((c for c in likeness if likeness[c] >= max(0.6, 0.9 * best)), key=lambda c: -likeness[c])
    return likely[:3]


def _likeness(name: str, candidate: str) -> float:
    """Return how alike two dotted names are, 0 to 1.

    It is the mean over the whole names and their last parts, of which one may be a word of the other.
    """
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    last, other = name.rpartition(".")[2], candidate.rpartition(".")[2]
    if last in other.split("_") or other in last.split("_"):
        return (whole + 1) / 2
    return (whole + difflib.SequenceMatcher(None, last, other).ratio()) / 2
