"""Turns errors of Hydra, OmegaConf and pydantic into one sentence that names the key and the closest match."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import yaml
from pydantic import ValidationError

from simbal.config.options import SWEEPS, option_keys, options
from simbal.config.schema import GROUPS, every_key
from simbal.errors import ConfigError, UserError

COULD_NOT = re.compile(r"Could not (?:override|append to config|delete from config)\S*.*?'?([\w./@-]+)'")
TYPES = {"int_type": "an integer", "float_type": "a number", "bool_type": "true or false"}  # by pydantic's error
# names of our keys in other tools and papers, too different for difflib to match
ALIASES = {
    "output_dir": "out output save_dir log_dir",
    "run": "resume resume_from checkpoint ckpt_path",
    "balancing": "method aux_loss",
    "lf": "loss_free aux_free",
    "lbl": "switch load_balancing",
    "model.num_layers": "layers n_layers num_hidden_layers depth",
    "model.d_model": "dim width n_embd hidden_size",
    "model.d_expert": "d_ff ffn_dim intermediate_size",
    "model.num_experts": "experts n_experts num_local_experts",
    "model.top_k": "k topk num_experts_per_tok",
    "data.files": "path file dataset data_path train_file",
    "data.seq_len": "context context_length block_size max_length",
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
    "hydra.launcher.n_jobs": "n_jobs jobs num_workers workers",
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
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None
    except Exception as error:
        if (sentence := describe_hydra_error(error, words)) is None:
            raise
        raise ConfigError(sentence) from None


def describe_validation_error(error: ValidationError, prefix: str = "", candidates: Collection[str] = ()) -> str:
    """Describe the first error that pydantic found.

    Args:
        error: the error.
        prefix: the dotted key of the validated values, with a final dot.
        candidates: keys to suggest for an unknown one; empty: all keys of a run.
    """
    first, *others = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")  # a typo is both
    context, value, kind = first.get("ctx", {}), first["input"], first["type"]
    if isinstance(context.get("error"), UserError):  # raised by a validator of ours
        return str(context["error"])
    path = [*filter(None, prefix.split(".")), *first["loc"]]
    if path[:1] in (["data"], ["logger"]) and len(path) > 2:
        del path[1]  # pydantic inserts the option of the union
    if kind.startswith("union_tag"):
        path.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    more = f" (and {len(others)} more)" if others else ""
    text = json.dumps(value) if value is None or isinstance(value, bool) else value
    match kind:
        case "extra_forbidden":
            sentence = f"there is no key {key}{suggest(key, candidates or all_keys())}"
        case "missing" | "union_tag_not_found":
            sentence = f"{key} is missing: set {key}=VALUE"
        case "literal_error" | "union_tag_invalid":
            allowed = re.findall(r"'([^']*)'", str(context.get("expected_tags", context.get("expected"))))
            sentence = f"{key}={text} is not one of {', '.join(allowed)}{suggest(str(value), allowed)}"
        case "int_type" | "float_type" | "bool_type":
            is_whole = kind == "int_type" and isinstance(value, float) and value.is_integer()
            remedy = f": write {key}={int(value)}" if is_whole else ""
            sentence = f"{key}={text} must be {TYPES[kind]}{remedy}"
        case "string_type":
            sentence = f"{key}={text} must be text; quote it twice, as in '{key}=\"{text}\"'"
        case _:
            reason = re.sub(r"^(Value error, must |Value error, |\w+ should )", "", first["msg"])
            reason = reason.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
            sentence = f"{key} must {reason}" if isinstance(value, dict) else f"{key}={text} must {reason}"
    return sentence + more


def describe_hydra_error(error: Exception, words: Sequence[str] = ()) -> str | None:  # noqa: PLR0911
    """Describe an error of Hydra, OmegaConf or YAML; return None for a bug, which is not the user's mistake.

    `words` are the arguments of the command line.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    text = _first_line(error)
    match error:
        case MissingConfigException(missing_cfg_file=str(file), options=list(names)) if names:
            group, _, option = file.rpartition("/")
            return _describe_option(group, option, names)
        case MissingConfigException() if found := re.search(r"Could not (?:load|find) '([\w/]+)/([^']+)'", text):
            return _describe_option(found[1], found[2], [*options(found[1])])
        case OverrideParseException(override=str(word)):
            return _describe_syntax_error(word, words)
        case OmegaConfBaseException():
            return f"{error.full_key}: {text}"
        case HydraException() if found := COULD_NOT.match(text):
            keys = getattr(getattr(error.__cause__, "object_type", None), "__dataclass_fields__", ())  # of a plugin
            others = [f"{found[1].rpartition('.')[0]}.{name}" for name in keys]
            return unknown_key(found[1], others, added=text.startswith("Could not append"))
        case HydraException() if text.startswith("You must specify"):
            group = text.split("'")[1]
            return f"set {group}=NAME: {group} has {', '.join(options(group))}"
        case HydraException() if text.startswith("Ambiguous value"):
            line = text.split("'")[1]
            key, _, values = line.partition("=")
            return f"{line} asks for several runs: add -m, or write a list as {key}=[{values}]"
        case HydraException() if isinstance(error.__cause__, OmegaConfBaseException):
            return f"{text} {_first_line(error.__cause__)}"
        case HydraException():
            return " ".join(str(error).split("\n")[:2]) if text.endswith(":") else text
        case yaml.MarkedYAMLError(problem_mark=mark) if mark:
            return f"{mark.name}, line {mark.line + 1}: {error.problem}"
        case ValueError() if text.startswith("Config group override must be"):
            return f"{next((word for word in words if word.endswith('=null')), 'null')}: a group needs an option"
        case ValueError() if text.startswith("Only one of --"):
            return text
    return None


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return re.sub("Environment variable '(.*)' not found", r"the environment variable \1 is not set", line)


def _describe_option(group: str, option: str, names: Collection[str]) -> str:
    """Describe an option that does not exist."""
    parts = re.split(r"[+&|; ]", option)
    if len(parts) > 1 and {*parts} <= {*names}:
        joined = ",".join(parts)
        return f"{group}={option}: write -m {group}={joined} to compare, {group}=[{joined}] to combine"
    if group == "data" and ("." in option or "/" in option):
        return f"data={option} is not an option; did you mean data=files data.files={option}?"
    listed = ", ".join([*names][:5]) + (", ...; --help lists all" if len(names) > 5 else "")
    return f"{group}={option}: there is no such option{suggest(option, names)} ({group} has {listed})"


def _describe_syntax_error(word: str, words: Sequence[str]) -> str:
    """Describe an argument that does not follow Hydra's grammar."""
    before = words[words.index(word) - 1] if word in words[1:] else ""
    before = "" if before.startswith("-") else before
    is_incomplete = word.endswith((",", "=")) or before.endswith((",", "="))
    if is_incomplete or any(word.count(opening) != word.count(closing) for opening, closing in ("[]", "()")):
        return f"{before} {word} is incomplete: write values without spaces, such as seed=1,2".lstrip()
    if "=" not in word:
        groups = [f"{group}={word}" for group in (*GROUPS, SWEEPS) if word in options(group)]
        return f"{word} has no value: write key=value" + (f"; did you mean {' or '.join(groups)}?" if groups else "")
    return f"""{word} cannot be read: a value with characters like {{ ? ~ = needs two pairs of quotes: 'key="value"'"""


def unknown_key(key: str, others: Sequence[str] = (), added: bool = False) -> str:
    """Describe a key that the selected options do not have.

    `others` are more keys to suggest; `added` is True if the command adds the key with `+`.
    """
    known = all_keys()
    if known.get(key) == "":
        return f"{key} exists: leave out the +" if added else f"{key} is not a key of this program; --help lists them"
    if key in known:
        return f"{key} belongs to {known[key]}, which is not selected: add {known[key]}"
    return f"there is no key {key}{suggest(key, [*known, *others])}"


def all_keys() -> dict[str, str]:
    """Return every dotted key with the `group=option` that it needs; "" for a key that every option has."""
    keys = dict.fromkeys([*every_key(), "run", "from", "hydra/launcher", "hydra/sweeper", "hydra.launcher.n_jobs"], "")
    for group in ("data", "logger", "balancing", "analysis"):
        by_option = {option: {*option_keys(group, option)} for option in options(group)}
        shared = set.intersection(*by_option.values())
        for option, names in by_option.items():
            for key in names - shared:
                if not key.endswith("._target_") and (option in key or not keys.get(key)):
                    keys[key] = f"{group}={option}"
    return keys


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean ...?` or an empty string. The part after the last dot counts as much as the full name."""
    names, last = [*dict.fromkeys(candidates)], name.rpartition(".")[2]
    for key in (key for key, aliases in ALIASES.items() if last in aliases.split() and key in names):
        option = all_keys().get(key, "") if "." in key else ""
        return f"; did you mean {option} {key}?".replace("  ", " ")
    ratio = difflib.SequenceMatcher
    scores = {
        other: ratio(None, name, other).ratio() + ratio(None, last, other.rpartition(".")[2]).ratio() for other in names
    }
    threshold = max(1.2, 0.95 * max(scores.values(), default=0.0))
    close = sorted((other for other in names if scores[other] >= threshold), key=lambda n: -scores[n])
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""
