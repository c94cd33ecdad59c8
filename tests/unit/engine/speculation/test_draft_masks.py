"""Masks after drafts equal those without drafts, and grammars offer the tokens that they force."""

from dataclasses import replace
from random import Random

import pytest

from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.constraints import compiled_grammar
from baton.engine.constraints.mask_tasks import MaskTask
from baton.engine.constraints.matcher_executor import MaskClocks
from baton.engine.constraints.token_bits import ids_of
from baton.engine.constraints.token_constraints import TokenConstraints, TokenMasks
from baton.engine.state.draft_rows import row_requests
from baton.engine.state.step import SampledToken, SampleRequest
from tests.scale import sized
from tests.unit.engine.speculation.byte_grammars import EOS, GRAMMARS, TOKENS, VOCAB_SIZE, ids, new_constraints, text_of

PROMPT = (7, 8, 9)


def request(rules: Sampling, outputs: list[int], drafts: tuple[int, ...] = ()) -> SampleRequest:
    return SampleRequest(
        sampling=rules,
        sample_indices=(0,),
        position=len(PROMPT) + len(outputs),
        history=token_ids([*PROMPT, *outputs]),
        num_prompt_tokens=len(PROMPT),
        drafts=drafts,
    )


def masks(by: TokenConstraints, rules: Sampling, outputs: list[int], drafts: tuple[int, ...] = ()) -> TokenMasks:
    return by.masks(row_requests([(1, request(rules, outputs, drafts))]))


def allowed(found: TokenMasks) -> list[set[int]]:
    """Return the allowed tokens of each row that can be drawn."""
    assert found.rows == tuple(range(len(found.rows)))
    return [set(ids_of(bits).tolist()) for bits in found.bits]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("seed", range(sized(2, 40)))
def test_masks_after_drafts_equal_those_after_the_same_outputs(grammar: str, seed: int) -> None:
    """Also in the steps after wrong drafts, for which the matcher has to go back."""
    rng, rules = Random(seed), Sampling(max_tokens=99, grammar=grammar)
    drafting, plain = new_constraints(), new_constraints(finds_forced=False)
    outputs: list[int] = []
    num_steps = num_cut = 0
    while num_steps < 30:
        num_steps += 1
        drafts: list[int] = []
        expected = allowed(masks(plain, rules, outputs))
        for _ in range(rng.randint(0, 5)):
            choices = sorted(expected[-1] - {EOS})
            if not choices or rng.random() < 0.15:
                drafts.append(rng.randrange(1, VOCAB_SIZE))  # probably forbidden
                break
            drafts.append(rng.choice(choices))
            expected += allowed(masks(plain, rules, [*outputs, *drafts]))
        found = masks(drafting, rules, outputs, tuple(drafts))
        if drafts and drafts[-1] not in expected[len(drafts) - 1]:
            assert found.deferred == {len(drafts)}
            num_cut += 1
        elif len(expected) == len(drafts):  # the last draft was possible by chance
            expected += allowed(masks(plain, rules, [*outputs, *drafts]))
        assert allowed(found) == expected
        assert not found.failures
        num_right = rng.randint(0, min(len(drafts), len(expected) - 1))
        outputs += drafts[:num_right]
        choices = sorted(expected[num_right] - {EOS})
        outputs = [*outputs, rng.choice(choices)] if choices else []
    assert num_cut or seed


def forced(by: TokenConstraints, rules: Sampling, outputs: list[int], drawn: list[int]) -> tuple[int, ...]:
    """Return what is forced after tokens that a step has drawn after these outputs."""
    step = request(rules, outputs)
    by.masks(row_requests([(1, step)]))
    tokens = [SampledToken(sample_index=0, token_id=token) for token in drawn]
    return by.forced_after([(1, step, tokens)]).get(1, ())


def test_forced_tokens_are_found_in_the_step_that_draws_the_token_before_them() -> None:
    rules, by = Sampling(max_tokens=99, grammar=GRAMMARS[0]), new_constraints()
    found = forced(by, rules, [], ids(b"{"))
    assert text_of(list(found)).startswith(b'"name":"')
    assert forced(by, rules, ids(b"{"), list(found[:2])) == found[2:], "after drafts that were right"
    assert forced(by, rules, ids(b'{"name":"'), ids(b"a")) == ()
    assert forced(new_constraints(finds_forced=False), rules, [], ids(b"{")) == ()


def test_forced_tokens_do_not_forbid_others() -> None:
    """The mask after a forced text was found still has every way to write it."""
    rules, by, plain = Sampling(max_tokens=99, grammar=GRAMMARS[0]), new_constraints(), new_constraints()
    for end in range(1, 9):
        outputs = ids(b'{"name":"'[:end])
        forced(by, rules, outputs[:-1], outputs[-1:])
        assert allowed(masks(by, rules, outputs)) == allowed(masks(plain, rules, outputs))


def test_work_for_long_forced_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "FORCED_BYTES", 2)
    rules, by = Sampling(max_tokens=999, grammar=f'start: "{"ab" * 200}"'), new_constraints()
    token = TOKENS.index(b"ab")
    num_found = sum(bool(forced(by, rules, [token] * count, [token])) for count in range(150))
    assert 0 < num_found < 10, "the tokenizer would write it with other tokens"


def test_nothing_is_forced_while_a_thread_uses_the_grammar_or_after_the_end() -> None:
    rules, by = Sampling(max_tokens=99, grammar=GRAMMARS[0]), new_constraints()
    assert forced(by, rules, [], ids(b"{"))
    (compiled,) = by._in_use
    with compiled.lock:
        step = request(rules, [])
        assert by.forced_after([(1, step, [SampledToken(sample_index=0, token_id=ids(b"{")[0])])]) == {}
    assert by.forced_after([(1, request(rules, ids(b"{")), [SampledToken(sample_index=0, token_id=EOS)])]) == {}
    several = replace(request(rules, []), sample_indices=(0, 1))
    assert by.forced_after([(1, several, [SampledToken(sample_index=0, token_id=ids(b"{")[0])])]) == {}


def test_masks_of_many_sequences_are_equal_after_a_search_for_forced_tokens() -> None:
    """Their matchers have consumed the new token already, and their masks are still computed together."""
    rules, by, plain = Sampling(max_tokens=99, grammar=GRAMMARS[1]), new_constraints(), new_constraints()
    rng, outputs = Random(5), list[list[int]]([[]] * 12)
    for _ in range(8):
        rows = row_requests([(key, request(rules, own)) for key, own in enumerate(outputs)])
        found, expected = by.masks(rows), plain.masks(rows)
        assert allowed(found) == allowed(expected)
        drawn = [SampledToken(sample_index=0, token_id=rng.choice(sorted(one - {EOS}))) for one in allowed(found)]
        by.forced_after([(key, row, [token]) for (key, row), token in zip(rows, drawn, strict=True)][::2])
        outputs = [[*own, token.token_id] for own, token in zip(outputs, drawn, strict=True)]
    (compiled,) = by._in_use
    assert compiled.num_together > 1


def test_search_for_forced_tokens_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, by = Sampling(max_tokens=99, grammar=GRAMMARS[0]), new_constraints()
    step = request(rules, [])
    by.masks(row_requests([(key, step) for key in range(5)]))
    times = iter(range(100))
    monkeypatch.setattr(by, "_clocks", MaskClocks(wall_s=lambda: next(times) * 0.0004, cpu_s=lambda: 0.0))
    drawn = [(key, step, [SampledToken(sample_index=0, token_id=ids(b"{")[0])]) for key in range(5)]
    assert sorted(by.forced_after(drawn)) == [0, 1]


def test_draft_that_only_another_rule_forbids_is_no_failure() -> None:
    rules = Sampling(max_tokens=99, grammar=GRAMMARS[1], allowed_token_ids=tuple(sorted(ids(b"ab"))))
    found = masks(new_constraints(), rules, ids(b"ab"), tuple(ids(b"c")))
    assert allowed(found)[0] == set(ids(b"ab"))
    assert not found.failures


def test_row_without_a_token_left_fails_for_itself() -> None:
    rules = Sampling(max_tokens=99, grammar=GRAMMARS[1], bad_words=tuple((i, j) for i in ids(b"a") for j in range(256)))
    found = masks(new_constraints(), rules, ids(b"b"), tuple(ids(b"a")))
    assert found.rows == (0,)
    assert set(found.failures) == {1}


def test_masks_of_other_drafts_are_used_as_far_as_they_are_equal() -> None:
    """A deferred sequence may come back with other drafts, while the masks of the first ones are computed."""
    task = MaskTask(None, 1, token_ids(), token_ids([1, 2, 3]))  # type: ignore[arg-type]
    task.positions = (None,) * 3  # type: ignore[assignment]
    found = [task.num_positions(token_ids(drafts)) for drafts in ((), (1,), (1, 2), (1, 2, 3, 4), (1, 9, 3), (9,))]
    assert found == [1, 2, 3, 3, 2, 1]
