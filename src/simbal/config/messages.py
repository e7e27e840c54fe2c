"""Turns the errors of Hydra, OmegaConf and pydantic into one sentence that names the key and the closest match."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import yaml
from pydantic import ValidationError

from simbal.config.options import SWEEPS, option_keys, options
from simbal.config.schema import GROUPS, every_key
from simbal.errors import ConfigError, UserError

COULD_NOT = re.compile(r"Could not (?:override|append to config|delete from config)\S*.*?'?([\w./@-]+)'")
FAULTS = {
    re.compile("Environment variable '(.*)' not found"): "the environment variable {} is not set",
    re.compile("Interpolation key '(.*)' not found"): "there is no key {}",
    re.compile("Unsupported interpolation type (.*)"): "${{{}:...}} is unknown; ${{oc.env:VARIABLE}} is allowed",
    re.compile("Recursive interpolation detected"): "the value refers to itself",
}
# names that other tools, papers and habit use for our keys; difflib cannot find them
ALIASES = {
    "seed": "seeds random_seed",
    "output_dir": "out output save_dir log_dir",
    "run": "resume resume_from checkpoint ckpt_path",
    "balancing": "method aux_loss",
    "model.num_layers": "layers n_layers num_hidden_layers depth",
    "model.d_model": "dim width n_embd hidden_size",
    "model.num_heads": "heads n_heads num_attention_heads",
    "model.d_expert": "d_ff ffn_dim intermediate_size",
    "model.num_experts": "experts n_experts num_local_experts",
    "model.top_k": "k topk num_experts_per_tok",
    "data.files": "path file dataset data_path train_file",
    "data.seq_len": "context context_length block_size max_length",
    "data.threads": "num_workers workers",
    "optim.lr": "lr learning_rate max_lr",
    "optim.weight_decay": "wd",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optim.grad_clip": "clip max_grad_norm gradient_clip_val",
    "trainer.max_steps": "steps num_steps iters epochs num_epochs max_epochs",
    "trainer.global_batch": "batch bs batch_size",
    "trainer.micro_batch": "device_batch_size per_device_train_batch_size grad_accum",
    "trainer.devices": "gpu gpus n_gpus num_gpus",
    "trainer.accelerator": "device cuda",
    "trainer.precision": "dtype amp fp16 bf16",
    "trainer.val_every": "eval_every eval_steps eval_interval",
    "trainer.ckpt_every": "save_every save_steps",
    "hydra.launcher.n_jobs": "n_jobs jobs workers",
    "lf": "loss_free aux_free",
    "lbl": "switch load_balancing",
    "adamw": "adam",
    "files": "text web",
    "tensorboard": "tb",
    "cuda": "gpu",
    "bf16-mixed": "bf16 fp16 amp",
}
PYDANTIC = {
    "extra_forbidden": "there is no key {key}{hint}",
    "missing": "{key} is missing: give {key}=VALUE",
    "union_tag_invalid": "{key}={value} is not one of {expected}{hint}",
    "union_tag_not_found": "{key} is missing",
    "literal_error": "{key}={value} is not one of {expected}{hint}",
    "int_type": "{key}={value} must be an integer{hint}",
    "float_type": "{key}={value} must be a number",
    "bool_type": "{key}={value} must be true or false",
    "string_type": "{key}={value} must be text; quote it twice, as in '{key}=\"{value}\"'",
    "greater_than": "{key}={value} must be greater than {gt}",
    "greater_than_equal": "{key}={value} must be at least {ge}",
    "less_than": "{key}={value} must be less than {lt}",
    "less_than_equal": "{key}={value} must be at most {le}",
    "finite_number": "{key}={value} must be a finite number",
}


@contextmanager
def raise_config_errors(words: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf, YAML and pydantic within the block into `ConfigError`.

    `words` are the arguments of the command line.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (sentence := of_pydantic(error) if isinstance(error, ValidationError) else of_hydra(error, words)) is None:
            raise
        raise ConfigError(sentence) from None


def of_pydantic(error: ValidationError, prefix: str = "", candidates: Iterable[str] = ()) -> str:
    """Return the first thing that pydantic found wrong as a sentence.

    Args:
        error: the error.
        prefix: the dotted key of what was validated, with a dot at its end.
        candidates: keys that may have been meant; empty: all keys of a run.
    """
    first, *others = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")  # a typo is both
    context, value, kind = first.get("ctx", {}), first["input"], first["type"]
    if isinstance(context.get("error"), UserError):  # from a validator of ours, whose sentence is whole
        return str(context["error"])
    path = [*filter(None, prefix.split(".")), *first["loc"]]
    if path[:1] in (["data"], ["logger"]) and len(path) > 2:
        del path[1]  # pydantic inserts the option of the union
    if kind.startswith("union_tag"):
        path.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    expected = re.findall(r"'([^']*)'", str(context.get("expected_tags") or context.get("expected") or ""))
    hint = closest(str(value), expected) if expected else ""
    if kind == "extra_forbidden":
        hint = closest(key, [*candidates] or all_keys())
    elif kind == "int_type" and isinstance(value, float) and value.is_integer():
        hint = f": write {key}={int(value)}"
    reason = "must " + re.sub(r"^(Value error, must |Value error, |\w+ should )", "", first["msg"])
    said = PYDANTIC.get(kind, ("{key} " if isinstance(value, dict) else "{key}={value} ") + reason)
    shown = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    more = f" (and {len(others)} more)" if others else ""
    numbers = {name: f"{bound:.15g}" for name, bound in context.items() if isinstance(bound, int | float)}
    return said.format(key=key, value=shown, hint=hint, expected=", ".join(expected), **numbers) + more


def of_hydra(error: Exception, words: Sequence[str] = ()) -> str | None:  # noqa: PLR0911
    """Return a sentence for an error of Hydra, OmegaConf or YAML; None if it is not the user's mistake.

    `words` are the arguments of the command line.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    text = str(error).partition("\n")[0]
    match error:
        case MissingConfigException(missing_cfg_file=str(file), options=list(names)) if names:
            group, _, option = file.rpartition("/")
            return _no_option(group, option, names)
        case MissingConfigException() if found := re.search(r"Could not (?:load|find) '([\w/]+)/([^']+)'", text):
            return _no_option(found[1], found[2], [*options(found[1])])
        case OverrideParseException(override=str(word)):
            return _unreadable(word, words)
        case OmegaConfBaseException():
            return f"{error.full_key}: {_fault(text)}"
        case HydraException() if found := COULD_NOT.match(text):
            keys = getattr(getattr(error.__cause__, "object_type", None), "__dataclass_fields__", ())  # of a plugin
            others = [f"{found[1].rpartition('.')[0]}.{name}" for name in keys]
            return unknown_key(found[1], others, added=text.startswith("Could not append"))
        case HydraException() if text.startswith("You must specify"):
            group = text.split("'")[1]
            return f"give {group}=NAME: {group} has {', '.join(options(group))}"
        case HydraException() if text.startswith("Ambiguous value"):
            line = text.split("'")[1]
            key, _, values = line.partition("=")
            return f"{line} asks for several runs: add -m, or write a list as {key}=[{values}]"
        case HydraException() if isinstance(error.__cause__, OmegaConfBaseException):
            return f"{text}: {_fault(str(error.__cause__).partition(chr(10))[0])}"
        case yaml.MarkedYAMLError(problem_mark=mark) if mark:
            return f"{mark.name}, line {mark.line + 1}: {error.problem}"
        case HydraException():
            return " ".join(str(error).split("\n")[:2]) if text.endswith(":") else text
        case ValueError() if text.startswith("Config group override must be"):
            return f"{next((word for word in words if word.endswith('=null')), 'null')}: a group needs an option"
        case ValueError() if text.startswith("Only one of --"):
            return text
    return None


def _no_option(group: str, option: str, names: Collection[str]) -> str:
    """Return what is wrong with an option that does not exist."""
    listed = ", ".join([*names][:5]) + (", ...; --help lists all" if len(names) > 5 else "")
    parts = re.split(r"[+&|; ]", option)
    if len(parts) > 1 and {*parts} <= {*names}:
        listed = ",".join(parts)
        return f"{group}={option}: write -m {group}={listed} to compare, {group}=[{listed}] to combine"
    if group == "data" and ("." in option or "/" in option):
        return f"data={option} is not an option; did you mean data=files data.files={option}?"
    return f"{group}={option}: there is no such option{closest(option, names)} ({group} has {listed})"


def _unreadable(word: str, words: Sequence[str]) -> str:
    """Return what is wrong with a word that Hydra's grammar does not have."""
    before = words[words.index(word) - 1] if word in words[1:] else ""
    is_cut = word.endswith((",", "=")) or before.endswith((",", "="))
    if is_cut or any(word.count(opening) != word.count(closing) for opening, closing in ("[]", "()")):
        return f"{before} {word} is incomplete: write values without spaces, such as seed=1,2".lstrip()
    if "=" not in word:
        groups = [f"{group}={word}" for group in (*GROUPS, SWEEPS) if word in options(group)]
        return f"{word} has no value: write key=value" + (f"; did you mean {' or '.join(groups)}?" if groups else "")
    return f"""{word} cannot be read: a value with characters like {{ ? ~ = needs two pairs of quotes: 'key="value"'"""


def _fault(text: str) -> str:
    """Return why OmegaConf cannot resolve a value."""
    for pattern, sentence in FAULTS.items():
        if found := pattern.search(text):
            return sentence.format(*found.groups())
    return text


def unknown_key(key: str, others: Sequence[str] = (), added: bool = False) -> str:
    """Return what is wrong with a key that the chosen options do not have.

    `others` are further candidates; `added` says that the command adds the key by `+`.
    """
    known = all_keys()
    if known.get(key) == "":
        return f"{key} exists: leave out the +" if added else f"{key} is not a key of this program; --help lists them"
    if key in known:
        return f"{key} belongs to {known[key]}, which is not chosen: add {known[key]}"
    return f"there is no key {key}{closest(key, [*known, *others])}"


def all_keys() -> dict[str, str]:
    """Return every dotted key, with the `group=option` that sets it if other options of its group do not."""
    keys = dict.fromkeys([*every_key(), "run", "from", "hydra/launcher", "hydra/sweeper", "hydra.launcher.n_jobs"], "")
    for group in ("data", "logger", "balancing", "analysis"):
        owned = {option: {*option_keys(group, option)} for option in options(group)}
        shared = set.intersection(*owned.values())
        for option, own in owned.items():
            for key in own - shared:
                if not key.endswith("._target_") and (option in key or not keys.get(key)):
                    keys[key] = f"{group}={option}"
    return keys


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean ...?`, or nothing. The part after the last dot counts as much as the whole name."""
    names, last = [*dict.fromkeys(candidates)], name.rpartition(".")[2]
    for meant in (key for key, aliases in ALIASES.items() if last in aliases.split() and key in names):
        owner = all_keys().get(meant, "") if "." in meant else ""
        return f"; did you mean {owner} {meant}?".replace("  ", " ")
    ratio = difflib.SequenceMatcher
    scores = {
        other: ratio(None, name, other).ratio() + ratio(None, last, other.rpartition(".")[2]).ratio() for other in names
    }
    best = max(scores.values(), default=0.0)
    likely = sorted((other for other in names if scores[other] >= max(1.2, 0.95 * best)), key=lambda n: -scores[n])
    return f"; did you mean {' or '.join(likely[:3])}?" if likely else ""
