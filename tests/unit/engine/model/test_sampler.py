"""The keyed sampler against the definition, written down again without any shortcut."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from baton.core.blocks import token_ids
from baton.core.errors import Reason
from baton.core.kv_layout import SAMPLER_VERSION
from baton.core.request import Sampling
from baton.engine.model.sampler import adjusted_logits, draw, kept_token_ids, noise, sample
from baton.engine.step import SampleRequest

VOCAB = 300


def request(
    *, history: tuple[int, ...] = (1, 2, 3), num_prompt_tokens: int = 2, samples: int = 1, banned: tuple[int, ...] = (), **sampling: object
) -> SampleRequest:
    return SampleRequest(
        sampling=Sampling(**({"max_tokens": 10} | sampling)),  # type: ignore[arg-type]
        sample_indices=tuple(range(samples)),
        position=len(history),
        history=token_ids(history),
        num_prompt_tokens=num_prompt_tokens,
        banned_token_ids=banned,
    )


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def splitmix64(state: int) -> int:
    """Steele et al. 2014, as published: add, then mix."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def gumbel(seed: int, sample_index: int, position: int, token: int) -> float:
    key = splitmix64(splitmix64(splitmix64(seed) ^ sample_index) ^ position)
    bits = splitmix64((key + token * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    return -math.log(-math.log(((bits >> 11) + 0.5) / 2**53))


def test_noise_is_what_the_definition_says() -> None:
    found = noise(2**63 + 5, 3, 1000, VOCAB)
    assert found == pytest.approx([gumbel(2**63 + 5, 3, 1000, token) for token in range(VOCAB)], rel=1e-12)


def test_noise_of_this_sampler_version() -> None:
    """Workers of one version must draw the same tokens: if this changes, SAMPLER_VERSION does."""
    assert SAMPLER_VERSION == 1
    assert noise(42, 0, 7, 3) == pytest.approx([-0.5596318250210441, -0.3883344451060634, 0.5804098408220633], abs=1e-12)


def test_noise_differs_by_each_part_of_its_key() -> None:
    base = noise(1, 0, 5, VOCAB)
    for other in (noise(2, 0, 5, VOCAB), noise(1, 1, 5, VOCAB), noise(1, 0, 6, VOCAB)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.2
    assert not set(noise(0, 1, 5, VOCAB)) & set(noise(1, 0, 5, VOCAB))


def test_draws_follow_the_distribution() -> None:
    """Frequencies over many seeds against softmax(logits / temperature)."""
    row = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    count = 4000
    drawn = Counter(draw(row, request(seed=seed, temperature=0.8))[0] for seed in range(count))
    wanted = np.exp(row / 0.8) / np.exp(row / 0.8).sum()
    for token, share in enumerate(wanted):
        assert drawn[token] / count == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


def naive_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    order = [i for i, mass in zip(order, before, strict=True) if mass < top_p]
    return {i for i in order if np.exp(scaled[i] - scaled.max()) >= min_p}


@pytest.mark.parametrize("top_k", [0, 1, 7, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_truncation(top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(3):
        scaled = logits(seed)[0].double().numpy() * (0.05 if seed == 2 else 1.0)  # nearly flat: top-p has to look far
        found = kept_token_ids(scaled, request(top_k=top_k, top_p=top_p, min_p=min_p))
        expected = naive_kept(scaled, top_k if top_k <= VOCAB else 0, top_p, min_p)
        assert set(range(VOCAB) if found is None else found.tolist()) == expected


def test_top_p_over_a_large_flat_vocabulary() -> None:
    scaled = np.linspace(0.0, 0.1, 5000)
    found = kept_token_ids(scaled, request(top_p=0.95))
    assert found is not None
    assert set(found.tolist()) == naive_kept(scaled, 0, 0.95, 0.0)


def test_equal_logits_are_kept_together() -> None:
    scaled = np.array([1.0, 3.0, 3.0, 3.0, 0.0])
    assert kept_token_ids(scaled, request(top_k=2)).tolist() == [1, 2, 3]  # type: ignore[union-attr]


def test_penalties() -> None:
    row = np.array([1.0, -1.0, 2.0, 2.0, 2.0], dtype=np.float32)
    history = (0, 1, 3, 3, 4)  # prompt 0, 1, 3; outputs 3, 4
    found = adjusted_logits(row, request(history=history, num_prompt_tokens=3, repetition_penalty=2.0))
    assert found.tolist() == [0.5, -2.0, 2.0, 1.0, 1.0]
    found = adjusted_logits(row, request(history=(0, 3, 3, 4), num_prompt_tokens=1, presence_penalty=0.5, frequency_penalty=0.25))
    assert found.tolist() == [1.0, -1.0, 2.0, 2.0 - 0.5 - 0.5, 2.0 - 0.5 - 0.25]


def test_bias_comes_before_penalties_and_bans_after() -> None:
    row = np.array([1.0, 1.0, 1.0], dtype=np.float32)
    found = adjusted_logits(row, request(history=(0, 1), repetition_penalty=2.0, logit_bias=((0, 3.0), (2, 9.0)), banned=(2,)))
    assert found.tolist() == [2.0, 0.5, -np.inf]


def test_history_can_grow_afterwards() -> None:
    """No view of the engine's array is left behind: it could not grow."""
    asked = request(repetition_penalty=2.0)
    kept = adjusted_logits(logits()[0].numpy(), asked)
    asked.history.append(4)
    assert kept.shape == (VOCAB,)


def keyed(row: np.ndarray, asked: SampleRequest, sample_index: int) -> np.ndarray:
    """What the drawn token is the argmax of, from the definition: -inf for what is not kept."""
    adjusted, sampling = adjusted_logits(row, asked), asked.sampling
    if sampling.is_greedy:
        return adjusted
    scaled = adjusted / sampling.temperature
    kept = naive_kept(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    hidden = [token not in kept for token in range(VOCAB)]
    return np.where(hidden, -np.inf, scaled + noise(sampling.seed, sample_index, asked.position, VOCAB))


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}, {"temperature": 1.7, "repetition_penalty": 1.5}]
)
def test_what_is_drawn_is_the_best_by_the_definition(sampling: dict[str, float]) -> None:
    for seed in range(5):
        row, asked = logits(seed)[0].numpy(), request(samples=4, seed=seed, **sampling)
        assert draw(row, asked) == tuple(int(keyed(row, asked, i).argmax()) for i in range(4))


def test_samples_of_one_request_differ_and_do_not_depend_on_each_other() -> None:
    row = torch.zeros(VOCAB).numpy()
    together = draw(row, request(samples=5, seed=1))
    assert len(set(together)) > 1
    alone = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=1), sample_indices=(3,), position=3, history=token_ids(), num_prompt_tokens=0
    )
    assert draw(row, alone) == (together[3],)


def test_batch_of_everything() -> None:
    """Rows do not mix: each as if it were alone."""
    asked = [
        request(temperature=0.0),
        request(seed=5, num_logprobs=2),
        request(temperature=0.0, banned=(int(logits(1, 6)[2].argmax()),), num_logprobs=0),
        request(samples=3, seed=8, top_p=0.5, num_logprobs=4),
        request(temperature=0.0, samples=2),
        request(seed=6),
    ]
    rows = logits(1, 6)
    found = sample(rows, list(enumerate(asked)))
    assert not found.failures
    for seq_id, one in enumerate(asked):
        alone = sample(rows[seq_id : seq_id + 1], [(seq_id, one)]).samples[seq_id]
        assert [s.token_id for s in found.samples[seq_id]] == list(draw(rows[seq_id].numpy(), one)) == [s.token_id for s in alone]
        assert [s.sample_index for s in found.samples[seq_id]] == list(one.sample_indices)
    assert found.samples[2][0].token_id != int(rows[2].argmax())


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, penalties and truncation; the chosen token's own also where it is not among the top."""
    rows = logits(2)
    asked = request(seed=5, temperature=2.0, top_k=0, repetition_penalty=1.7, logit_bias=((17, 50.0),), num_logprobs=3)
    (token,) = sample(rows, [(0, asked)]).samples[0]
    reference = torch.log_softmax(rows[0], dim=-1)
    assert token.token_id == 17
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(reference[17]), abs=1e-6)
    values, ids = reference.topk(3)
    assert [i for i, _ in token.logprobs.top] == ids.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_numbers_fails_alone(bad: float, temperature: float) -> None:
    rows = logits(4, 3)
    rows[1, 7] = bad
    asked = [(seq_id, request(temperature=temperature, num_logprobs=2)) for seq_id in (10, 11, 12)]
    found = sample(rows, asked)
    assert found.failures[11].reason is Reason.NUMERICAL_ERROR
    assert set(found.samples) == {10, 12}
    assert found.samples[12] == sample(rows[2:], asked[2:]).samples[12]


def test_a_request_that_cannot_be_sampled_fails_alone() -> None:
    rows = logits(5, 3)
    everything = request(temperature=0.0, banned=tuple(range(VOCAB)))
    found = sample(rows, [(1, everything), (2, request(logit_bias=((VOCAB, 1.0),))), (3, request())])
    assert set(found.failures) == {1, 2}
    assert "no token" in found.failures[1].message
    assert set(found.samples) == {3}


def test_minus_infinity_is_only_unlikely() -> None:
    rows = logits(6)
    rows[0, :100] = -torch.inf
    found = sample(rows, [(0, request(top_p=0.9, num_logprobs=1))])
    assert found.samples[0][0].token_id >= 100


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []).samples == {}
