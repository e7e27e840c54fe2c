"""Analyses of a Hugging Face model agree with transformers."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral import modeling_mixtral

from simbal.analysis.dropping import dropping
from simbal.analysis.evaluate import evaluate
from simbal.analysis.generate import Sampler, continue_tokens
from simbal.analysis.orthogonality import orthogonality
from simbal.analysis.pruning import pruning
from simbal.analysis.quality import quality
from simbal.analysis.redundancy import redundancy
from simbal.analysis.routing import routing
from simbal.analysis.subject import NotApplicableError
from simbal.errors import UserError
from simbal.hf import describe
from simbal.hf.balancing import balancing
from simbal.hf.routers import RULES
from tests.hf.architectures import RULE, E, K, record_experts
from tests.hf.measured import CONTEXT, IDS, guide, host_of, request, save, saved, write_text
from tests.in_process import run
from tests.metrics.all_experts import pairwise_expert_similarity

PRUNING = {"rule": "absolute", "renorm_after": False, "allow_none": False, "repeats": 1}
ANALYSES = {
    "quality": {"tokens": None, "batch_size": 3, "resamples": 10, "seed": 0},
    "redundancy": {"tokens": 256, "batch_size": 3},
    "routing": {"tokens": 256, "batch_size": 3, "pairs": 100, "bins": 5, "seed": 0, "against": None},
    "orthogonality": {},
    "dropping": {"tokens": 256, "batch_size": 3, "drops": [0, 1]},
    "pruning": {"tokens": 256, "batch_size": 3, "thresholds": [0, 0.3], **PRUNING},
    "counterfactual": {"tokens": 256, "batch_size": 3, "draws": 2, "resamples": 10, "seed": 0},
    "margin": {"tokens": 256, "batch_size": 3, "quantiles": [0.1, 0.5]},
    "route_agreement": {
        "tokens": 256,
        "batch_size": 3,
        "against": None,
        "dtype": None,
        "backend": None,
        "other_batch_size": 1,
    },
    "coactivation": {"tokens": 256, "batch_size": 3},
    "ep_load": {"tokens": 256, "batch_size": 3, "step": 2, "devices": None, "seed": 0},
    "generate": {"prompt": "The", "tokens": 4, "samples": 2, "temperature": 1.0, "top_p": 1.0, "seed": 0},
    "balancing": {},
}
ALIKE = ("minimax_m2", "nemotron_h")  # whose weights are alike, so that none is pruned
UNSUITED = {  # analyses that refuse an architecture
    "phimoe": ("counterfactual", "dropping", "margin", "route_agreement"),
    "longcat_flash": ("redundancy", "pruning"),
}


def measure(asked, *names: str) -> dict[str, dict]:
    """Run analyses and return their records."""
    modules = {name: f"simbal.analysis.{name}" for name in names} | {"balancing": "simbal.hf.balancing"}
    settings = {name: {"_target_": f"{modules[name]}.{name}", **ANALYSES[name]} for name in names}
    evaluate(settings, None, False, "cpu", asked.output_dir, hf=asked)
    return {name: json.loads((asked.results / "analysis" / f"{name}.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def host(folder):
    return host_of(folder, "qwen3_moe")


def batch_of(host, tokens: int | None):
    windows_BT = torch.from_numpy(host.validation.windows_WT[host.validation.sample(tokens)].astype("int64"))
    return windows_BT[:, :-1], windows_BT[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULE)
def test_every_architecture_is_measured_by_every_analysis(folder, name):
    asked = request(folder, saved(folder, name))
    found = measure(asked, *(analysis for analysis in ANALYSES if analysis not in UNSUITED.get(name, ())))
    theirs = AutoModelForCausalLM.from_pretrained(folder / name)
    inputs_BS, targets_BS = batch_of(asked, None)
    with torch.no_grad():
        expected = F.cross_entropy(theirs(inputs_BS).logits.flatten(0, 1), targets_BS.flatten()).item()
    assert found["quality"]["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
    if "pruning" in found:
        assert 1 <= found["pruning"]["arms"]["0.3"]["experts"] < K or name in ALIKE
    assert found["routing"]["num_experts"] == E
    assert found["coactivation"]["layers"]["tokens_per_expert"] == found["routing"]["layers"]["tokens_per_expert"]
    assert found["balancing"]["findings"] == [vars(finding) for finding in describe(theirs).findings]
    model = json.loads((asked.results / "model.json").read_text())
    assert model["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())
    if name in UNSUITED:
        for refused in UNSUITED[name]:
            with pytest.raises(UserError, match="define no weights|one at a time"):
                measure(asked, refused)
    if "margin" in found:
        assert found["dropping"]["curve"][0]["loss"] == pytest.approx(expected, rel=0.05)  # on other windows
        assert found["counterfactual"]["metrics"]["loss"] == pytest.approx(expected, rel=0.05)
        assert found["margin"]["by_logits"] == RULE[name][0].is_topk


@torch.no_grad()
@pytest.mark.parametrize("name", ["phimoe", "deepseek_v3"])
def test_entropy_uses_the_weights_that_the_experts_get(folder, name):
    host = host_of(folder, name)
    calls = record_experts(host.model)
    found = routing(host, 256, 4, pairs=10, bins=5, seed=0, against=None).record["metrics"]["entropy"]
    weights_NK = torch.cat([next(each for each in call[1:] if each.is_floating_point()) for call in calls]).double()
    entropy_N = torch.special.entr(weights_NK / weights_NK.sum(-1, keepdim=True)).sum(-1)
    assert found == pytest.approx(entropy_N.mean().item(), rel=1e-5)


def test_bits_per_byte_refer_to_the_text(host):
    found = quality(host, None, 4, 10, 0).record
    nats = found["metrics"]["loss"] * found["tokens"]
    _, targets_BS = batch_of(host, None)
    text = host.tokenizer().decode(targets_BS.flatten().tolist())  # end of text has no bytes
    bits = nats / torch.tensor(2.0).log().item()
    assert found["metrics"]["bpb"] == pytest.approx(bits / len(text.encode()), rel=1e-5)


@torch.no_grad()
def test_pes_compares_the_outputs_of_all_experts(host):
    """Expected by the formula of Qwen3's experts; the analysis runs the experts of transformers one by one."""
    inputs_BS, _ = batch_of(host, 256)
    with host.inputs() as inputs, host.similarity() as watched:
        list(host.predict(2, 256))
    for layer, router in enumerate(host.routers):
        gate_up_E2D, down_EDF = router.experts.gate_up_proj, router.experts.down_proj
        gate_ENF, up_ENF = torch.einsum("nd,efd->enf", inputs[layer], gate_up_E2D).chunk(2, -1)
        outputs_END = torch.einsum("enf,edf->end", F.silu(gate_ENF) * up_ENF, down_EDF)
        expected_N = pairwise_expert_similarity(outputs_END.double())
        torch.testing.assert_close(watched.similarity_LN[layer, -len(expected_N) :], expected_N, atol=1e-5, rtol=0)
    assert watched.similarity_LN.shape == (len(host.routers), inputs_BS.numel())


@torch.no_grad()
def test_dropped_experts_have_the_largest_logits(folder):
    """Mixtral renormalizes, so a logit of -inf equals an expert that does not exist."""
    host = host_of(folder, "mixtral")
    inputs_BS, targets_BS = batch_of(host, 256)
    for point in dropping(host, 256, 4, [0, 1, 3]).record["curve"]:

        def drop(module, args, output, count=point["drop"]):
            logits_NE = output[0].scatter(1, output[0].topk(count).indices, -torch.inf)
            probs_NK, experts_NK = logits_NE.softmax(1).topk(K)
            return logits_NE, probs_NK / probs_NK.sum(1, keepdim=True), experts_NK

        model = AutoModelForCausalLM.from_pretrained(host.path)
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(drop)
        expected = F.cross_entropy(model(inputs_BS).logits.flatten(0, 1), targets_BS.flatten())
        assert point["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_pruned_experts_are_not_computed(host, monkeypatch):
    computed, experts = [], host.routers[0].experts
    forward = experts.forward

    def count(x_ND, experts_NK, weights_NK):
        computed.append(experts_NK.numel())
        return forward(x_ND, experts_NK, weights_NK)

    monkeypatch.setattr(experts, "forward", count)
    record = pruning(host, 256, 4, [0.5], **PRUNING).record
    kept = record["layers"]["experts_0.5"][0] * record["tokens"]
    assert sum(computed[-len(host.validation.batches(256, 4)) :]) == pytest.approx(kept)
    assert record["arms"]["plain"]["loss"] == pytest.approx(quality(host, 256, 4, 2, 0).record["metrics"]["loss"])


def test_groups_limit_how_many_experts_can_be_dropped(folder):
    host = host_of(folder, "deepseek_v3")
    assert len(dropping(host, 64, 1, None).record["curve"]) == E // 2 - K + 1  # two of four groups are available
    with pytest.raises(UserError, match="drops="):
        dropping(host, 64, 1, [3])


@torch.no_grad()
def test_greedy_text_equals_that_of_transformers(host):
    prompt_BS, new = batch_of(host, 256)[0][:2, :5], 8
    every_id_V = torch.ones(IDS, dtype=torch.bool)
    ours_BT, _ = continue_tokens(host.decoder(), prompt_BS, new, Sampler(0.0, 1.0, 0), every_id_V)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    theirs_BS = host.model.generate(prompt_BS, attention_mask=torch.ones_like(prompt_BS), **options)
    assert torch.equal(ours_BT, theirs_BS[:, 5:])


def test_a_dense_model_supports_only_quality_and_generate(folder):
    config = LlamaConfig(
        vocab_size=IDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    asked = request(folder, save(LlamaForCausalLM(config), folder / "llama"))
    measure(asked, "quality", "generate")
    dense = asked.load()
    for analysis in (routing, redundancy, dropping, orthogonality, pruning, balancing):
        with pytest.raises(UserError):
            analysis(dense, **ANALYSES[analysis.__name__])


def test_a_model_with_unknown_routers_supports_quality(folder):
    host = host_of(folder, "mixtral", num_experts_per_tok=1)  # a weight of 1 fits softmax and sigmoid
    assert quality(host, 64, 1, 2, 0).record["metrics"]["loss"] > 0
    with pytest.raises(UserError, match="follows none of the rules"):
        routing(host, **ANALYSES["routing"])


def test_experts_that_cannot_run_one_at_a_time_are_refused(folder):
    host = host_of(folder, "longcat_flash")
    assert quality(host, 64, 1, 2, 0).record["metrics"]["loss"] > 0
    for analysis in (redundancy, pruning):
        with pytest.raises(NotApplicableError, match="one at a time"):
            analysis(host, **ANALYSES[analysis.__name__])


def test_attention_is_never_taken_from_a_folder(folder, tmp_path):
    model = shutil.copytree(saved(folder, "mixtral"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"attn_implementation": "someone/kernel"}
    (model / "config.json").write_text(json.dumps(config))
    assert request(tmp_path, model).load().model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_offloaded_weights_give_the_same_numbers(folder, host, monkeypatch):
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 250_000})
    away = request(folder, folder / "qwen3_moe").load()
    assert any(parameter.is_meta for parameter in away.model.parameters())
    for analysis in (quality, redundancy, routing, orthogonality, dropping):
        keys = ANALYSES[analysis.__name__]
        assert analysis(away, **keys).record["metrics"] == analysis(host, **keys).record["metrics"], analysis


def test_a_folder_of_results_belongs_to_one_model_and_one_text(folder, capsys):
    asked = request(folder, saved(folder, "olmoe"), name="one")
    for _ in range(2):
        measure(asked, "quality")
    assert "already exists" in capsys.readouterr().out
    for change, part in (
        ({"context": 32}, r"different context \(64, not 32\)"),
        ({"data": asked.data | {"seed": 3}}, r"different seed \(0, not 3\)"),
    ):
        with pytest.raises(UserError, match=part):
            measure(request(folder, folder / "olmoe", name="one", **change), "quality")


def test_bf16_is_computed_on_request(folder, host):
    halved = request(folder, folder / "qwen3_moe", dtype="bfloat16").load()
    assert {parameter.dtype for parameter in halved.model.parameters()} == {torch.bfloat16}
    assert halved.precisions == {"trained": "float32", "analyzed": "bfloat16"}
    losses = [quality(each, 256, 4, 2, 0).record["metrics"]["loss"] for each in (halved, host)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


class SquaredSigmoidRouter(modeling_mixtral.MixtralTopKRouter):
    """A router that transformers does not have."""

    def forward(self, hidden_states):
        logits = hidden_states.flatten(0, -2) @ self.weight.T
        weights, experts = logits.sigmoid().square().topk(self.top_k)
        return logits, weights, experts


def test_the_program_in_the_guide_adds_a_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_mixtral, "MixtralTopKRouter", SquaredSigmoidRouter)
    monkeypatch.setattr("simbal.hf.routers.RULES", [*RULES])
    folder = saved(tmp_path, "mixtral")
    program = re.search(r"```python\n([^`]*SquaredSigmoid.+?)```", guide(), re.DOTALL)
    (tmp_path / "measure.py").write_text(program[1])
    keys = [f"hf={folder}", "data=files", f"data.files={write_text(tmp_path)}", "analysis=routing"]
    assert "follows none of the rules" in run(tmp_path, "evaluate.py", *keys).stderr
    done = run(tmp_path, str(tmp_path / "measure.py"), "evaluate", *keys)
    assert done.returncode == 0, done.stderr


def remove_a_weight(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def add_code(model: Path) -> None:
    (model / "modeling_own.py").write_text(f"open({str(model / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    config = json.loads((model / "config.json").read_text()) | {"model_type": "own", "auto_map": auto_map}
    (model / "config.json").write_text(json.dumps(config))


def add_an_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (remove_a_weight, "model.norm.weight"), (add_code, "config.json cannot be read"),
        (add_an_adapter, "adapter_config.json"),
    ],
)  # fmt: skip
def test_a_model_is_refused_with_a_one_sentence_error_and_its_code_is_not_executed(folder, tmp_path, damage, part):
    model = shutil.copytree(saved(folder, "mixtral"), tmp_path / "model")
    damage(model)
    with pytest.raises(UserError, match=part) as refused:
        measure(request(tmp_path, model), "quality")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "outputs").exists()
    assert not (model / "ran").exists()
