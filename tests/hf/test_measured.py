"""What analyses find of a model of Hugging Face is what transformers computes of it."""

import json
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from simbal.analysis.dropping import dropping
from simbal.analysis.evaluate import evaluate
from simbal.analysis.generate import Sampler, continue_tokens
from simbal.analysis.orthogonality import orthogonality
from simbal.analysis.pruning import pruning
from simbal.analysis.quality import quality
from simbal.analysis.redundancy import redundancy
from simbal.analysis.routing import routing
from simbal.errors import UserError
from tests.conftest import CONF
from tests.hf.architectures import RULE, E, K
from tests.hf.guide import table
from tests.hf.measured import CONTEXT, IDS, host_of, request, save, saved, write_text
from tests.metrics.all_experts import pairwise_expert_similarity

PRUNING = {"rule": "absolute", "renorm_after": False, "allow_none": False, "repeats": 1}
ANALYSES = {
    "quality": {"tokens": None, "batch_size": 3, "resamples": 10, "seed": 0},
    "redundancy": {"tokens": 512, "batch_size": 3},
    "routing": {"tokens": 512, "batch_size": 3, "pairs": 100, "bins": 5, "seed": 0, "against": None},
    "orthogonality": {},
    "dropping": {"tokens": 512, "batch_size": 3, "drops": None},
    "pruning": {"tokens": 512, "batch_size": 3, "thresholds": [0, 0.3], **PRUNING},
    "counterfactual": {"tokens": 256, "batch_size": 3, "draws": 2, "resamples": 10, "seed": 0},
    "margin": {"tokens": 512, "batch_size": 3, "quantiles": [0.1, 0.5]},
    "coactivation": {"tokens": 512, "batch_size": 3},
    "ep_load": {"tokens": 512, "batch_size": 3, "step": 2, "devices": None, "seed": 0},
    "generate": {"prompt": "The", "tokens": 4, "samples": 2, "temperature": 1.0, "top_p": 1.0, "seed": 0},
}
WITHOUT = {
    "phimoe": ("counterfactual", "dropping", "margin")
}  # analyses that refuse an architecture; the guide says so
PHI = "weigh an expert by those that come close to it"


def settings(*names: str) -> dict:
    return {name: {"_target_": f"simbal.analysis.{name}.{name}", **ANALYSES[name]} for name in names or ANALYSES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def host(folder):
    return host_of(folder, "qwen3_moe")


def batch_of(host, tokens: int):
    windows_BT = torch.from_numpy(host.validation.windows_WT[host.validation.sample(tokens)].astype("int64"))
    return windows_BT[:, :-1], windows_BT[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULE)
def test_every_architecture_is_measured_by_every_analysis(folder, name, capsys):
    asked = request(folder, saved(folder, name))
    names = [analysis for analysis in ANALYSES if analysis not in WITHOUT.get(name, ())]
    evaluate(settings(*names), None, False, "cpu", asked.output_dir, hf=asked)
    results = folder / "outputs" / "models" / name
    found = {name: json.loads((results / "analysis" / f"{name}.json").read_text()) for name in names}
    theirs = AutoModelForCausalLM.from_pretrained(folder / name)
    inputs_BS, targets_BS = batch_of(asked, None)
    with torch.no_grad():
        expected = F.cross_entropy(theirs(inputs_BS).logits.flatten(0, 1), targets_BS.flatten())
    assert found["quality"]["metrics"]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["pruning"]["arms"]["plain"]["experts"] == K
    assert 1 <= found["pruning"]["arms"]["0.3"]["experts"] < K or name == "minimax_m2"  # whose weights are all alike
    assert found["routing"]["num_experts"] == E
    assert found["coactivation"]["layers"]["tokens_per_expert"] == found["routing"]["layers"]["tokens_per_expert"]
    assert found["ep_load"]["devices"] == [number for number in range(2, E + 1) if E % number == 0]
    record = json.loads((results / "model.json").read_text())
    assert record["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())
    if name != "phimoe":
        assert found["dropping"]["curve"][0]["loss"] == pytest.approx(expected.item(), rel=0.05)  # of other windows
        assert found["counterfactual"]["metrics"]["loss"] == pytest.approx(expected.item(), rel=0.05)
        assert found["margin"]["by_logits"] == RULE[name][0].plain
    else:
        for refused in WITHOUT[name]:
            with pytest.raises(UserError, match=PHI):
                evaluate(settings(refused), None, False, "cpu", asked.output_dir, hf=asked)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "phimoe", "deepseek_v3"])
def test_entropy_is_that_of_the_weights_which_experts_are_given(folder, name):
    host, given = host_of(folder, name), []

    def note(module, arguments):
        weights_NK = next(each for each in arguments[1:] if each.is_floating_point())
        p_NK = weights_NK.double() / weights_NK.double().sum(-1, keepdim=True)
        given.append(-(p_NK * p_NK.log()).sum(-1))

    handles = [router.experts.register_forward_pre_hook(note) for router in host.routers]
    found = routing(host, 256, 4, pairs=10, bins=5, seed=0, against=None).record["metrics"]["entropy"]
    for handle in handles:
        handle.remove()
    assert found == pytest.approx(torch.cat(given).mean().item(), rel=1e-5)


def test_bits_per_byte_are_of_the_text_itself(host):
    found = quality(host, None, 4, 10, 0).record
    nats = found["metrics"]["loss"] * found["tokens"]
    _, targets_BS = batch_of(host, None)
    text = host.tokenizer().decode(targets_BS.flatten().tolist())  # end of text stands for no byte
    assert found["metrics"]["bpb"] == pytest.approx(
        nats / torch.tensor(2.0).log().item() / len(text.encode()), rel=1e-5
    )


@torch.no_grad()
def test_pes_is_that_of_the_outputs_of_all_experts(host):
    """By the formula of Qwen3's experts; what is measured runs the experts of transformers one by one."""
    inputs_BS, _ = batch_of(host, 256)
    with host.inputs() as inputs, host.similarity() as seen:
        list(host.predict(2, 256))
    for layer, router in enumerate(host.routers):
        gate_up_E2D, down_EDF = router.experts.gate_up_proj, router.experts.down_proj
        gate_ENF, up_ENF = torch.einsum("nd,efd->enf", inputs[layer], gate_up_E2D).chunk(2, -1)
        outputs_END = torch.einsum("enf,edf->end", F.silu(gate_ENF) * up_ENF, down_EDF)
        expected_N = pairwise_expert_similarity(outputs_END.double())
        last = len(expected_N)
        torch.testing.assert_close(seen.similarity_LN[layer, -last:], expected_N, atol=1e-5, rtol=0)
    assert seen.similarity_LN.shape == (len(host.routers), inputs_BS.numel())


@torch.no_grad()
def test_dropped_experts_are_those_of_the_largest_logits(folder):
    """Mixtral divides the weights of the chosen by their sum: a logit of -inf is an expert that is not there."""
    host = host_of(folder, "mixtral")
    found = dropping(host, None, 4, [0, 1, 3]).record["curve"]
    inputs_BS, targets_BS = batch_of(host, None)
    for point in found:
        model = AutoModelForCausalLM.from_pretrained(host.path)
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(without(point["drop"]))
        expected = F.cross_entropy(model(inputs_BS).logits.flatten(0, 1), targets_BS.flatten())
        assert point["loss"] == pytest.approx(expected.item(), rel=1e-5)


def without(drop: int):
    def hook(module, args, output):
        logits_NE = output[0].scatter(1, output[0].topk(drop).indices, -torch.inf)
        probs_NK, experts_NK = logits_NE.softmax(1).topk(K)
        return logits_NE, probs_NK / probs_NK.sum(1, keepdim=True), experts_NK

    return hook


def test_an_expert_below_the_threshold_is_not_computed(host, monkeypatch):
    computed = []
    experts = host.routers[0].experts
    real = experts.forward

    def counted(x_ND, experts_NK, weights_NK):
        computed.append(experts_NK.numel())
        return real(x_ND, experts_NK, weights_NK)

    monkeypatch.setattr(experts, "forward", counted)
    record = pruning(host, 256, 4, [0.5], **PRUNING).record
    kept = record["layers"]["experts_0.5"][0] * record["tokens"]
    assert sum(computed[-len(host.validation.batches(256, 4)) :]) == pytest.approx(kept)
    assert record["arms"]["plain"]["loss"] == pytest.approx(quality(host, 256, 4, 2, 0).record["metrics"]["loss"])


def test_groups_bound_how_many_experts_can_be_dropped(folder):
    host = host_of(folder, "deepseek_v3")
    assert len(dropping(host, 64, 1, None).record["curve"]) == E // 2 - K + 1  # two of four groups are open
    with pytest.raises(UserError, match="drops=.* must be null or a list of whole numbers from 0 to 2"):
        dropping(host, 64, 1, [3])


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(host):
    prompt_BS, new = batch_of(host, 256)[0][:2, :5], 8
    possible_V = torch.ones(IDS, dtype=torch.bool)
    ours_BT, _ = continue_tokens(host.decoder(), prompt_BS, new, Sampler(0.0, 1.0, 0), possible_V)
    mask_BS = torch.ones_like(prompt_BS)
    asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    theirs_BS = host.model.generate(prompt_BS, attention_mask=mask_BS, **asked)
    assert torch.equal(ours_BT, theirs_BS[:, 5:])


def test_a_dense_model_has_quality_and_text_alone(folder):
    config = LlamaConfig(
        vocab_size=IDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    asked = request(folder, save(LlamaForCausalLM(config), folder / "llama"))
    evaluate(settings("quality", "generate"), None, False, "cpu", asked.output_dir, hf=asked)
    dense = asked.load()
    for analysis, says in ((routing, "analysis=routing needs routers, and .* is a dense model"), (redundancy, "has 0"),
                           (dropping, "is a dense model"), (orthogonality, "is a dense model"),
                           (pruning, "is a dense model")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            analysis(dense, **ANALYSES[analysis.__name__])


def test_a_router_that_is_not_known_leaves_quality(folder):
    host = host_of(folder, "mixtral", num_experts_per_tok=1)  # its weight is 1: softmax and sigmoid decide alike
    assert quality(host, 64, 1, 2, 0).record["metrics"]["loss"] > 0
    with pytest.raises(UserError, match="follows none of the rules"):
        routing(host, **ANALYSES["routing"])


@pytest.mark.slow
def test_weights_that_do_not_fit_into_memory_give_the_same_numbers(folder, host, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setattr("simbal.hf.load._free_memory", lambda device: 200_000)
    away = request(folder, folder / "qwen3_moe").load()
    assert any(parameter.is_meta for parameter in away.model.parameters())
    for analysis in (quality, redundancy, routing, orthogonality, dropping):
        keys = ANALYSES[analysis.__name__]
        assert analysis(away, **keys).record["metrics"] == analysis(host, **keys).record["metrics"], analysis


def test_the_folder_of_results_is_of_one_model_and_one_text(folder, capsys):
    asked = request(folder, saved(folder, "olmoe"), name="one")
    for _ in range(2):
        evaluate(settings("quality"), None, False, "cpu", asked.output_dir, hf=asked)
    assert "already exists" in capsys.readouterr().out
    for change, says in (({"context": 32}, r"another context \(64, not 32\)"),
                         ({"dtype": "bfloat16"}, r"another dtype \(float32, not bfloat16\)"),
                         ({"data": asked.data | {"validation_document_tokens": 9}}, r"document_tokens \(None, not 9\)"),
                         ({"data": asked.data | {"seed": 3}}, r"another seed \(0, not 3\)")):  # fmt: skip
        other = request(folder, folder / "olmoe", name="one", **change)
        with pytest.raises(UserError, match=says):
            evaluate(settings("quality"), None, False, "cpu", asked.output_dir, hf=other)


def test_half_precision_is_computed_where_it_is_asked_for(folder, host):
    halved = request(folder, folder / "qwen3_moe", dtype="bfloat16").load()
    assert {parameter.dtype for parameter in halved.model.parameters()} == {torch.bfloat16}
    assert halved.precisions == {"trained": "float32", "analysed": "bfloat16"}
    losses = [quality(each, 256, 4, 2, 0).record["metrics"]["loss"] for each in (halved, host)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


def test_the_guide_names_every_architecture_and_what_it_is_measured_by():
    without = {name: ", ".join(f"`{analysis}`" for analysis in names) for name, names in WITHOUT.items()}
    found = {name: f"all but {without[name]}" if name in without else "all" for name in RULE}
    assert {name: row["measured by"] for name, row in table().items()} == found


@pytest.mark.slow
def test_a_rule_of_ones_own_is_added_as_the_guide_shows(tmp_path):
    """Its program measures a model whose routers transformers does not have."""
    guide = (CONF.parent / "docs/guide/measuring.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.+?)```", guide, re.DOTALL)[1]
    folder, router = (
        saved(tmp_path, "mixtral"),
        (
            "from transformers.models.mixtral import modeling_mixtral as m\n"
            "class SquaredSigmoidRouter(m.MixtralTopKRouter):\n"
            "    def forward(self, x):\n"
            "        logits = x.flatten(0, -2) @ self.weight.T\n"
            "        weights, experts = logits.sigmoid().square().topk(self.top_k)\n"
            "        return logits, weights, experts\n"
            "m.MixtralTopKRouter = SquaredSigmoidRouter\n"
        ),
    )
    (tmp_path / "measure.py").write_text(router + program)
    (tmp_path / "plain.py").write_text(router + "from simbal.cli.main import main\nmain()\n")
    asked = ["evaluate", f"hf={folder}", "data=files", f"data.files={write_text(tmp_path)}", "analysis=routing"]
    done, refused = (
        subprocess.run([sys.executable, name, *asked], cwd=tmp_path, capture_output=True, text=True, check=False)
        for name in ("measure.py", "plain.py")
    )
    assert done.returncode == 0, done.stderr
    assert "already exists" in refused.stdout  # needs no model
