"""Compares the samplers on host and device with a direct implementation of the definition, and with each
other."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
import torch

from baton.core.errors import Reason
from baton.core.kv.block_hash import token_ids
from baton.core.kv.kv_layout import SAMPLER_VERSION
from baton.core.request import Sampling
from baton.engine.state.step import SampleRequest
from baton.model.sampling import device_sampler, host_sampler
from baton.model.sampling.device_sampler import truncation_threshold
from baton.model.sampling.logits_processors import process_logits
from baton.model.sampling.sampler import Draw, SampledStep, sample
from baton.model.sampling.sampling_noise import noise_key

VOCAB = 300
CPU = torch.device("cpu")


def request(
    *,
    history: tuple[int, ...] = (1, 2, 3),
    num_prompt_tokens: int = 2,
    samples: int = 1,
    banned: tuple[int, ...] = (),
    **sampling: object,
) -> SampleRequest:
    return SampleRequest(
        sampling=Sampling(**({"max_tokens": 10} | sampling)),  # type: ignore[arg-type]
        sample_indices=tuple(range(samples)),
        position=len(history),
        history=token_ids(history),
        num_prompt_tokens=num_prompt_tokens,
        banned_token_ids=banned,
    )


def logits(seed: int = 0, rows: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


class Sampler:
    """Samples with one way to draw tokens; by default the one for a CPU."""

    def __init__(self, draw: Draw | None = None) -> None:
        self._draw = draw

    def sampled(self, rows: torch.Tensor, asked: list[tuple[int, SampleRequest]]) -> SampledStep:
        return sample(rows, asked, self._draw).result()

    def draw(self, row: np.ndarray, asked: SampleRequest) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.sampled(torch.from_numpy(row)[None], [(0, asked)]).samples[0])


@pytest.fixture(params=["host", "device"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Return the sampler of a CPU or that of a GPU, which also runs on a CPU here."""
    return Sampler(device_sampler.draw if request.param == "device" else None)


def noise_on_device(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """Compute one row of noise together with another."""
    found: np.ndarray = device_sampler.noise([7, noise_key(seed, sample_index, position)], vocab_size, CPU)[1].numpy()
    return found


def adjusted_on_device(row: np.ndarray, asked: SampleRequest) -> np.ndarray:
    """Process one row between two others, which must not change."""
    rows = torch.from_numpy(row).double().repeat(3, 1)
    found: np.ndarray = process_logits(rows, [request(temperature=0.0), asked, request()]).numpy()
    assert found[0].tolist() == found[2].tolist() == row.tolist()
    return found[1]


def kept_on_device(scaled: np.ndarray, asked: SampleRequest) -> np.ndarray:
    """Truncate one row beside a row that keeps one token and a row that keeps nearly all."""
    rows = torch.from_numpy(np.stack([scaled, np.flip(scaled), scaled]))
    least = truncation_threshold(rows, [request(top_k=1), request(min_p=1e-30), asked])
    found: np.ndarray = (rows[2] >= least[2]).nonzero()[:, 0].numpy()
    return found


NOISES = pytest.mark.parametrize("noise", [host_sampler.noise, noise_on_device])
ADJUSTERS = pytest.mark.parametrize("processed_logits", [host_sampler.processed_logits, adjusted_on_device])
KEEPERS = pytest.mark.parametrize("kept_token_ids", [host_sampler.kept_token_ids, kept_on_device])
Noise = Callable[[int, int, int, int], np.ndarray]
Adjuster = Callable[[np.ndarray, SampleRequest], np.ndarray]
Keeper = Callable[[np.ndarray, SampleRequest], np.ndarray | None]


def splitmix64(state: int) -> int:
    """Compute splitmix64 as published by Steele et al. 2014: add, then mix."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def defined_noise(seed: int, sample_index: int, position: int, token: int) -> float:
    key = splitmix64(splitmix64(splitmix64(seed) ^ sample_index) ^ position)
    bits = splitmix64((key + token * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    return -math.log(-math.log(((bits >> 11) + 0.5) / 2**53))


@NOISES
def test_noise_matches_the_definition(noise: Noise) -> None:
    found = noise(2**63 + 5, 3, 1000, VOCAB)
    assert found == pytest.approx([defined_noise(2**63 + 5, 3, 1000, token) for token in range(VOCAB)], rel=1e-12)


@NOISES
def test_noise_is_fixed_for_this_sampler_version(noise: Noise) -> None:
    """Workers of one version must draw the same tokens. If this test fails, SAMPLER_VERSION must change."""
    assert SAMPLER_VERSION == 2
    assert noise(42, 0, 7, 3) == pytest.approx(
        [-0.5596318250210441, -0.3883344451060634, 0.5804098408220633], abs=1e-12
    )


@NOISES
def test_noise_differs_by_each_part_of_its_key(noise: Noise) -> None:
    base = noise(1, 0, 5, VOCAB)
    for other in (noise(2, 0, 5, VOCAB), noise(1, 1, 5, VOCAB), noise(1, 0, 6, VOCAB)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.2
    assert not set(noise(0, 1, 5, VOCAB)) & set(noise(1, 0, 5, VOCAB))


def test_draws_follow_the_distribution(sampler: Sampler) -> None:
    """Compare frequencies over many seeds with softmax(logits / temperature)."""
    row = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    count = 4000
    drawn = Counter(sampler.draw(row, request(seed=seed, temperature=0.8))[0] for seed in range(count))
    expected = np.exp(row / 0.8) / np.exp(row / 0.8).sum()
    for token, share in enumerate(expected):
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
@KEEPERS
def test_truncation(kept_token_ids: Keeper, top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(3):
        # nearly flat, so top-p needs many tokens
        scaled = logits(seed)[0].double().numpy() * (0.05 if seed == 2 else 1.0)
        found = kept_token_ids(scaled, request(top_k=top_k, top_p=top_p, min_p=min_p))
        expected = naive_kept(scaled, top_k if top_k <= VOCAB else 0, top_p, min_p)
        assert set(range(VOCAB) if found is None else found.tolist()) == expected


@KEEPERS
def test_top_p_over_a_large_flat_vocabulary(kept_token_ids: Keeper) -> None:
    scaled = np.linspace(0.0, 0.1, 5000)
    found = kept_token_ids(scaled, request(top_p=0.95))
    assert found is not None
    assert set(found.tolist()) == naive_kept(scaled, 0, 0.95, 0.0)


@KEEPERS
@pytest.mark.parametrize("size", [5, 1000])
def test_equal_logits_are_kept_together(kept_token_ids: Keeper, size: int) -> None:
    """Truncation never separates tokens with equal logits."""
    scaled = np.array([1.0, *[3.0] * (size - 2), 0.0])
    assert kept_token_ids(scaled, request(top_k=2)).tolist() == list(range(1, size - 1))  # type: ignore[union-attr]


@ADJUSTERS
def test_penalties(processed_logits: Adjuster) -> None:
    row = np.array([1.0, -1.0, 2.0, 2.0, 2.0], dtype=np.float32)
    history = (0, 1, 3, 3, 4)  # prompt 0, 1, 3; outputs 3, 4
    found = processed_logits(row, request(history=history, num_prompt_tokens=3, repetition_penalty=2.0))
    assert found.tolist() == [0.5, -2.0, 2.0, 1.0, 1.0]
    found = processed_logits(
        row, request(history=(0, 3, 3, 4), num_prompt_tokens=1, presence_penalty=0.5, frequency_penalty=0.25)
    )
    assert found.tolist() == [1.0, -1.0, 2.0, 2.0 - 0.5 - 0.5, 2.0 - 0.5 - 0.25]


@ADJUSTERS
def test_bias_comes_before_penalties_and_bans_after(processed_logits: Adjuster) -> None:
    row = np.array([1.0, 1.0, 1.0], dtype=np.float32)
    bias = ((0, 1.0), (2, 9.0), (0, 2.0))
    found = processed_logits(row, request(history=(0, 1), repetition_penalty=2.0, logit_bias=bias, banned=(2,)))
    assert found.tolist() == [2.0, 0.5, -np.inf]


@ADJUSTERS
def test_sampling_holds_no_view_of_the_history(processed_logits: Adjuster) -> None:
    """A view of the engine's array would prevent it from growing."""
    asked = request(repetition_penalty=2.0)
    kept = processed_logits(logits()[0].numpy(), asked)
    asked.history.append(4)
    assert kept.shape == (VOCAB,)


def keyed(row: np.ndarray, asked: SampleRequest, sample_index: int) -> np.ndarray:
    """Return the values whose argmax is the drawn token, by the definition: -inf for tokens that are not
    kept."""
    processed, sampling = host_sampler.processed_logits(row, asked), asked.sampling
    if sampling.is_greedy:
        return processed
    scaled = processed / sampling.temperature
    kept = naive_kept(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    hidden = [token not in kept for token in range(VOCAB)]
    return np.where(hidden, -np.inf, scaled + host_sampler.noise(sampling.seed, sample_index, asked.position, VOCAB))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 1.7, "repetition_penalty": 1.5},
    ],
)
def test_drawn_token_is_the_argmax_by_the_definition(sampling: dict[str, float], sampler: Sampler) -> None:
    for seed in range(5):
        row, asked = logits(seed)[0].numpy(), request(samples=4, seed=seed, **sampling)
        assert sampler.draw(row, asked) == tuple(int(keyed(row, asked, i).argmax()) for i in range(4))


def test_samples_of_one_request_differ_and_do_not_depend_on_each_other(sampler: Sampler) -> None:
    row = torch.zeros(VOCAB).numpy()
    batched = sampler.draw(row, request(samples=5, seed=1))
    assert len(set(batched)) > 1
    separate = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=1),
        sample_indices=(3,),
        position=3,
        history=token_ids(),
        num_prompt_tokens=0,
    )
    assert sampler.draw(row, separate) == (batched[3],)


def test_rows_of_a_mixed_batch_are_independent(sampler: Sampler) -> None:
    """Each row gives the same result as in a batch of its own."""
    asked = [
        request(temperature=0.0),
        request(seed=5, num_logprobs=2),
        request(temperature=0.0, banned=(int(logits(1, 6)[2].argmax()),), num_logprobs=0),
        request(samples=3, seed=8, top_p=0.5, num_logprobs=4),
        request(temperature=0.0, samples=2),
        request(seed=6),
    ]
    rows = logits(1, 6)
    found = sampler.sampled(rows, list(enumerate(asked)))
    assert not found.failures
    for seq_id, one in enumerate(asked):
        separate = sampler.sampled(rows[seq_id : seq_id + 1], [(seq_id, one)]).samples[seq_id]
        assert (
            [s.token_id for s in found.samples[seq_id]]
            == list(sampler.draw(rows[seq_id].numpy(), one))
            == [s.token_id for s in separate]
        )
        assert [s.sample_index for s in found.samples[seq_id]] == list(one.sample_indices)
    assert found.samples[2][0].token_id != int(rows[2].argmax())


def test_logprobs_are_those_of_the_unmodified_logits(sampler: Sampler) -> None:
    """They are taken before temperature, penalties and truncation. The chosen token has one even if it is not
    among the top."""
    rows = logits(2)
    asked = request(seed=5, temperature=2.0, top_k=0, repetition_penalty=1.7, logit_bias=((17, 50.0),), num_logprobs=3)
    (token,) = sampler.sampled(rows, [(0, asked)]).samples[0]
    reference = torch.log_softmax(rows[0], dim=-1)
    assert token.token_id == 17
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(reference[17]), abs=1e-6)
    values, ids = reference.topk(3)
    assert [i for i, _ in token.logprobs.top] == ids.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)


@pytest.mark.fault("F-13")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_with_nan_fails_without_affecting_others(bad: float, temperature: float, sampler: Sampler) -> None:
    rows = logits(4, 3)
    rows[1, 7] = bad
    asked = [(seq_id, request(temperature=temperature, num_logprobs=2)) for seq_id in (10, 11, 12)]
    found = sampler.sampled(rows, asked)
    assert found.failures[11].reason is Reason.NUMERICAL_ERROR
    assert set(found.samples) == {10, 12}
    assert found.samples[12] == sampler.sampled(rows[2:], asked[2:]).samples[12]


def test_invalid_request_fails_without_affecting_others(sampler: Sampler) -> None:
    everything = request(temperature=0.0, banned=tuple(range(VOCAB)))
    unknown = (
        request(logit_bias=((VOCAB, 1.0),)),
        request(banned=(VOCAB,)),
        request(history=(1, VOCAB), presence_penalty=1.0),
    )
    rows = logits(5, 5)
    found = sampler.sampled(rows, list(enumerate([everything, *unknown, request()])))
    assert set(found.failures) == {0, 1, 2, 3}
    assert "no token" in found.failures[0].message
    assert all(f"token id {VOCAB} is outside" in found.failures[seq_id].message for seq_id in (1, 2, 3))
    assert found.samples[4] == sampler.sampled(rows[4:], [(4, request())]).samples[4]


def test_minus_infinity_logits_are_allowed(sampler: Sampler) -> None:
    rows = logits(6)
    rows[0, :100] = -torch.inf
    found = sampler.sampled(rows, [(0, request(top_p=0.9, num_logprobs=1))])
    assert found.samples[0][0].token_id >= 100


def test_sampling_no_rows_returns_nothing(sampler: Sampler) -> None:
    assert sampler.sampled(torch.empty(0, VOCAB), []).samples == {}


def any_request(rng: Random, vocab_size: int) -> SampleRequest:
    return request(
        history=tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, 20))),
        num_prompt_tokens=rng.randint(0, 10),
        samples=rng.choice((1, 1, 1, 3)),
        banned=tuple(rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 3)))),
        temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 1.9)),
        top_k=rng.choice((0, 0, 1, 40, vocab_size - 1, vocab_size)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 1e-9)),
        min_p=rng.choice((0.0, 0.0, 0.05, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.0, 0.7, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 1.5)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.5)),
        seed=rng.getrandbits(64),
        num_logprobs=rng.choice((None, 0, 3)),
        logit_bias=tuple((rng.randrange(vocab_size), rng.uniform(-9, 9)) for _ in range(rng.choice((0, 0, 4)))),
    )


@pytest.mark.parametrize("vocab_size", [VOCAB, 5000])
@pytest.mark.parametrize("seed", range(8))
def test_device_sampler_equals_host_sampler(vocab_size: int, seed: int) -> None:
    """Include more rows of one kind than are processed at a time."""
    rng = Random(seed)
    sampler = Sampler(partial(device_sampler.draw, max_values=vocab_size * rng.choice((1, 3, 100))))
    rows = logits(seed, 40, vocab_size) * rng.choice((0.05, 1.0))
    asked = [any_request(rng, vocab_size) for _ in rows]
    found = sampler.sampled(rows, list(enumerate(asked)))
    assert not found.failures
    for i, one in enumerate(asked):
        assert tuple(token.token_id for token in found.samples[i]) == host_sampler.draw(rows[i].numpy(), one), one
        assert all((token.logprobs is None) == (one.sampling.num_logprobs is None) for token in found.samples[i])


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_candidate_search_in_a_large_vocabulary_finds_the_argmax(spread: float, temperature: float) -> None:
    size = 20_000
    row = (logits(1, vocab_size=size)[0] * spread).bfloat16().float().numpy()  # some values are equal
    banned = tuple(np.argsort(row)[-3:].tolist())
    for seed in range(40):
        asked = request(temperature=temperature, seed=seed, samples=2, banned=banned)
        scaled = host_sampler.processed_logits(row, asked) / temperature
        best = tuple(
            int((scaled + host_sampler.noise(seed, index, asked.position, size)).argmax()) for index in range(2)
        )
        assert host_sampler.draw(row, asked) == best
