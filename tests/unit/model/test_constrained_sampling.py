"""Both samplers draw constrained rows as the definition does, and report logprobs from before the masks."""

from random import Random

import numpy as np
import pytest
import torch

from baton.core.errors import Code, Reason
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.constraints.token_bits import bits_of, clear, flags_of, ids_of
from baton.engine.constraints.token_constraints import TokenConstraints, TokenMasks
from baton.engine.state.step import SampleRequest, StepPlan, StepSequence
from baton.model.sampling import device_sampler
from baton.model.sampling.sampler import SampledStep, sample
from baton.model.step.step_launch import StepLauncher
from tests.sampling_reference import reference_choice

DRAWS = pytest.mark.parametrize("draw", [None, device_sampler.draw], ids=["host", "device"])


def any_request(rng: Random, vocab_size: int, allowed: set[int]) -> SampleRequest:
    sampling = Sampling(
        max_tokens=10,
        temperature=rng.choice((0.0, 0.0, 0.4, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 2, 40, vocab_size)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.3)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 1.5)),
        seed=rng.getrandbits(64),
        num_logprobs=rng.choice((None, 3)),
        logit_bias=tuple((rng.randrange(vocab_size), rng.uniform(-9, 9)) for _ in range(rng.choice((0, 0, 4)))),
        allowed_token_ids=tuple(sorted(allowed)),
    )
    history = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(3, 20)))
    return SampleRequest(
        sampling=sampling,
        sample_indices=tuple(range(rng.choice((1, 1, 3)))),
        position=len(history),
        history=token_ids(history),
        num_prompt_tokens=2,
    )


@DRAWS
@pytest.mark.parametrize("vocab_size", [99, 9000])
def test_constrained_draws_equal_the_definition(draw: object, vocab_size: int) -> None:
    rng, rows = Random(vocab_size), 24
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    sizes = [rng.choice((1, 2, 5, vocab_size // 3, vocab_size - 1)) for _ in range(rows)]
    allowed = [set(rng.sample(range(vocab_size), size)) for size in sizes]
    requests = [any_request(rng, vocab_size, one if row % 4 else set()) for row, one in enumerate(allowed)]
    asked = list(enumerate(requests))
    masks = TokenConstraints(vocab_size=vocab_size).masks(asked)
    assert masks.rows == tuple(row for row in range(rows) if row % 4)
    found = sample(logits, asked, draw, masks=masks).result()  # type: ignore[arg-type]
    assert not found.failures
    logprobs = torch.log_softmax(logits, dim=-1).numpy()
    for row, request in asked:
        only = allowed[row] if row % 4 else None
        for token in found.samples[row]:
            assert token.token_id == reference_choice(logits[row].numpy(), request, token.sample_index, only), request
            if token.logprobs is not None:
                assert token.logprobs.logprob == pytest.approx(logprobs[row][token.token_id], abs=1e-5)
                assert [pair[0] for pair in token.logprobs.top] == np.argsort(-logprobs[row])[:3].tolist()


@DRAWS
def test_rows_without_a_token_fail_alone(draw: object) -> None:
    logits = torch.zeros(3, 40)
    logits[2, 7] = float("nan")
    plain = SampleRequest(
        sampling=Sampling(max_tokens=1, temperature=0.0),
        sample_indices=(0,),
        position=1,
        history=token_ids([1]),
        num_prompt_tokens=1,
        banned_token_ids=(0,),
    )
    none_left = SampleRequest(
        sampling=Sampling(max_tokens=1, bad_words=tuple((token_id,) for token_id in range(40))),
        sample_indices=(0, 1),
        position=1,
        history=token_ids([1]),
        num_prompt_tokens=1,
    )
    asked = [(10, plain), (11, none_left), (12, none_left)]
    masks = TokenConstraints(vocab_size=40).masks(asked)
    found: SampledStep = sample(logits, asked, draw, masks=masks).result()  # type: ignore[arg-type]
    assert [token.token_id for token in found.samples[10]] == [1]
    assert found.failures[11].reason is Reason.NO_TOKEN_LEFT
    assert found.failures[12].reason is Reason.NUMERICAL_ERROR


@DRAWS
def test_deferred_rows_have_neither_tokens_nor_a_failure(draw: object) -> None:
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, temperature=0.0, allowed_token_ids=(3,), num_logprobs=1),
        sample_indices=(0, 1),
        position=1,
        history=token_ids([1]),
        num_prompt_tokens=1,
    )
    logits = torch.zeros(3, 40)
    logits[2, 7] = float("nan")
    masks = TokenMasks(rows=(0,), bits=bits_of([3], 40)[None], deferred=frozenset({1, 2}))
    asked = [(10, request), (11, request), (12, request)]
    found = sample(logits, asked, draw, masks=masks).result()  # type: ignore[arg-type]
    assert [token.token_id for token in found.samples[10]] == [3, 3]
    assert (found.samples.keys(), found.failures.keys(), found.deferred) == ({10}, {12}, {11})


@DRAWS
def test_bans_that_leave_no_token_fail_only_their_request(draw: object) -> None:
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, temperature=0.0),
        sample_indices=(0,),
        position=1,
        history=token_ids([1]),
        num_prompt_tokens=1,
        banned_token_ids=tuple(range(40)),
    )
    failure = sample(torch.zeros(1, 40), [(1, request)], draw).result().failures[1]  # type: ignore[arg-type]
    assert (failure.reason, failure.code) == (Reason.NO_TOKEN_LEFT, Code.UNPROCESSABLE)


def test_bits_are_sets_of_ids() -> None:
    for vocab_size in (1, 31, 32, 33, 100):
        ids = sorted(Random(vocab_size).sample(range(vocab_size), vocab_size // 2))
        bits = bits_of(ids, vocab_size)
        assert ids_of(bits).tolist() == np.flatnonzero(flags_of(bits, vocab_size)).tolist() == ids
        clear(bits, ids[::2])
        assert ids_of(bits).tolist() == ids[1::2]
    both = np.stack([bits_of([0, 40], 50), bits_of([49], 50)])
    assert [np.flatnonzero(row).tolist() for row in flags_of(both, 50)] == [[0, 40], [49]]
    assert TokenMasks().by_row() == {}


@pytest.mark.parametrize(
    ("sampling", "can_follow"),
    [
        (Sampling(max_tokens=1), True),
        (Sampling(max_tokens=1, allowed_token_ids=(1,), bad_words=((2,),)), True),
        (Sampling(max_tokens=1, bad_words=((2, 3),)), False),
        (Sampling(max_tokens=1, grammar="start: /a/"), False),
    ],
)
def test_steps_whose_masks_need_the_last_token_are_not_launched_before_it_is_known(
    sampling: Sampling, can_follow: bool
) -> None:
    request = SampleRequest(
        sampling=sampling, sample_indices=(0,), position=1, history=token_ids([1]), num_prompt_tokens=1
    )
    part = StepSequence(
        seq_id=1, token_ids=token_ids([0]), position_begin=1, kv_begin=1, block_table=(0,), sample=request
    )
    launcher = StepLauncher.__new__(StepLauncher)
    launcher._failpoints = type("Failpoints", (), {"is_armed": False})()
    assert launcher.can_follow(StepPlan(step_id=2, sequences=(part,), follows=1)) is can_follow
