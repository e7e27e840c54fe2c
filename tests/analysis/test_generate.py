"""The analysis `generate`."""

import json

import pytest
import torch

from simbal.analysis.evaluate import evaluate
from simbal.analysis.generate import PrefixSteering, Sampler, cached_decoder, continue_tokens
from simbal.analysis.trained import load
from simbal.balancing.composition import Composition
from simbal.model.attention import KeyValueCache
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from tests.balancing.cases import CASES
from tests.model.test_transformer import shape

END = 60
KEYS = {
    "_target_": "simbal.analysis.generate.generate",
    "prompt": "", "tokens": 8, "samples": 2, "temperature": 1.0, "top_p": 1.0, "seed": 0,
}  # fmt: skip
POSSIBLE = torch.ones(61, dtype=torch.bool)


def model_and_steering(case, document_end: int | None = None) -> tuple[Transformer, Composition]:
    model = Transformer(shape(gating=case.gating, renormalize=case.renormalize, document_end=document_end)).eval()
    initialize(model, seed=0, std=0.3, router_init="normal")
    steering = Composition({"strategy": case.make()}, {}).eval()
    steering.prepare(model.routers)
    generator = torch.Generator().manual_seed(1)
    for buffer in steering.buffers():  # a bias that affects the choice
        if buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model, steering


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    # below the vocabulary of the conformance suite, for which a balanced table of `hash` is made
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(2))


def in_pieces(model, steering, tokens_BS, pieces) -> torch.Tensor:
    cache = KeyValueCache(model.shape.num_layers)
    steering = PrefixSteering(steering, cache)
    return torch.cat([model(piece, steering, cache)[0] for piece in tokens_BS.split(pieces, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_with_a_cache_equal_logits_of_the_full_sequence_for_every_strategy(case):
    model, steering = model_and_steering(case)
    tokens_BS = tokens()
    whole_BSD, _ = model(tokens_BS, steering)
    for pieces in ([5] + [1] * 7, [1, 4, 7]):
        cached_BSD = in_pieces(model, steering, tokens_BS, pieces)
        torch.testing.assert_close(cached_BSD @ model.head_VD.T, whole_BSD @ model.head_VD.T, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_new_document_hides_the_past_in_the_cache():
    model, steering = model_and_steering(CASES[0], document_end=END)
    tokens_BS = tokens()
    tokens_BS[0, 4] = tokens_BS[0, 5] = tokens_BS[1, 9] = END
    whole_BSD, _ = model(tokens_BS, steering)
    cached_BSD = in_pieces(model, steering, tokens_BS, [3] + [1] * 9)
    torch.testing.assert_close(cached_BSD, whole_BSD, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case.name == "lf"], ids=str)
def test_greedy_decoding_with_a_cache_equals_recomputing_each_step(case):
    model, steering = model_and_steering(case)
    prompt_BS = tokens(length=3)
    ids_BT, nll_BT = continue_tokens(cached_decoder(model, steering), prompt_BS, 10, Sampler(0.0, 1.0, 0), POSSIBLE)
    sequence_BS = prompt_BS
    for step in range(10):
        logits_BV = model(sequence_BS, steering)[0][:, -1] @ model.head_VD.T
        best_B = logits_BV.argmax(1)
        assert torch.equal(best_B, ids_BT[:, step])
        expected_B = torch.nn.functional.cross_entropy(logits_BV, best_B, reduction="none")
        torch.testing.assert_close(nll_BT[:, step], expected_B, atol=1e-5, rtol=1e-5)
        sequence_BS = torch.cat([sequence_BS, best_B[:, None]], 1)


def test_samples_follow_temperature_and_top_p():
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    uniform_B = torch.arange(1000, dtype=torch.float64) / 1000
    for temperature, top_p, expected in [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
        (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (1.0, 0.7, [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        (1.0, 1e-9, [1, 0, 0, 0]),
        (1e-9, 1.0, [1, 0, 0, 0]),
        (0.0, 1.0, [1, 0, 0, 0]),
    ]:
        drawn_B = Sampler(temperature, top_p, 0).sample(logits_V.expand(1000, 4), uniform_B)
        counts = torch.bincount(drawn_B, minlength=4) / 1000
        assert counts.tolist() == pytest.approx(expected, abs=2e-3)


def test_a_token_that_is_not_allowed_is_never_sampled():
    logits_BV = torch.tensor([[0.0, -torch.inf, 0.0]]).expand(3, 3)
    sampled_B = Sampler(1.0, 1.0, 0).sample(logits_BV, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert sampled_B.tolist() == [0, 2, 2]


def test_a_sample_does_not_depend_on_the_number_of_samples_or_tokens():
    numbers_BT = Sampler(1.0, 1.0, 3).uniform_numbers(4, 9)
    assert torch.equal(numbers_BT[:2, :5], Sampler(1.0, 1.0, 3).uniform_numbers(2, 5))
    assert len(numbers_BT.unique()) == 36


def test_a_sample_ends_at_the_end_of_a_text(text_run, monkeypatch):
    eot = load(text_run.path).store.meta["eot"]
    ids_BT = torch.tensor([[65, 66, eot, 67], [65, 66, 67, 68]])
    answer = (ids_BT, torch.tensor([[1.0, 2, 3, 99], [1, 2, 3, 4]]))
    monkeypatch.setattr("simbal.analysis.generate.continue_tokens", lambda *_: answer)
    evaluate({"generate": KEYS}, str(text_run.path), True, "cpu", "unused")
    found = json.loads((text_run.path / "analysis" / "generate.json").read_text())
    assert [sample["ended"] for sample in found["samples"]] == [True, False]
    assert found["samples"][0]["ids"] == [65, 66]
    assert found["metrics"] == {"nll": 16 / 7, "ended": 0.5}
