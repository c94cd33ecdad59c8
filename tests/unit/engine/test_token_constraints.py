"""Masks of constrained sequences, compared with independent oracles over the demo model's vocabulary."""

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints import mask_tasks, token_constraints
from baton.engine.constraints.compiled_grammar import (
    MAX_LEXER_BYTES,
    MAX_TOGETHER,
    MIN_TOGETHER,
    NUM_FAST_AFTER_SLOW,
    NUM_FAST_MASKS,
    OVERHEAD_S,
    QUICK_S,
    SLOW_MASK_S,
    CompiledGrammar,
)
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, read_grammar_tokenizer
from baton.engine.constraints.mask_tasks import MaskTask, compute_masks
from baton.engine.constraints.matcher_executor import MaskClocks, MatcherExecutor
from baton.engine.constraints.sequence_matchers import MAX_MATCHERS
from baton.engine.constraints.token_bits import ids_of
from baton.engine.constraints.token_constraints import MAX_CACHED_GRAMMARS, TokenConstraints, TokenMasks
from baton.engine.state.step import SampleRequest
from baton.model.loading.model_source import DEMO_DIR
from tests.demo_vocabulary import DEMO_EOS_TOKEN_IDS, DEMO_VOCAB_SIZE, demo_text, demo_tokens

PADDED = 100
VOCAB_SIZE = DEMO_VOCAB_SIZE + PADDED
"""As of a model whose logits are wider than its vocabulary."""
IM_START = 1
PROMPT = (7, 8, 9)


@cache
def tokenizer_of(vocab_size: int) -> GrammarTokenizer:
    """Return the tokenizer for a width of the logits, which the constraints of a worker only read."""
    return read_grammar_tokenizer(DEMO_DIR, vocab_size=vocab_size, eos_token_ids=DEMO_EOS_TOKEN_IDS)


def new_constraints(vocab_size: int = VOCAB_SIZE, num_threads: int = 1) -> TokenConstraints:
    return TokenConstraints(
        vocab_size=vocab_size,
        eos_token_ids=DEMO_EOS_TOKEN_IDS,
        tokenizer=tokenizer_of(vocab_size),
        num_threads=num_threads,
    )


@cache
def constraints() -> TokenConstraints:
    return new_constraints()


def of_regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


def sampling(grammar: str = "", **changes: object) -> Sampling:
    return replace(Sampling(max_tokens=100, grammar=grammar), **changes)  # type: ignore[arg-type]


def request(rules: Sampling, outputs: Sequence[int] = (), banned: tuple[int, ...] = ()) -> SampleRequest:
    return SampleRequest(
        sampling=rules,
        sample_indices=(0,),
        position=len(PROMPT) + len(outputs),
        history=token_ids([*PROMPT, *outputs]),
        num_prompt_tokens=len(PROMPT),
        banned_token_ids=banned,
    )


def allowed(
    rules: Sampling,
    outputs: Sequence[int] = (),
    *,
    banned: tuple[int, ...] = (),
    by: TokenConstraints | None = None,
    seq_id: int = 1,
) -> set[int] | Failure:
    """Return the tokens that may follow `outputs`, or the failure of the sequence."""
    masks = (by or constraints()).masks([(seq_id, request(rules, outputs, banned))])
    if masks.failures:
        assert masks.rows == ()
        return masks.failures[0]
    assert masks.rows == (0,)
    return set(ids_of(masks.bits[0]).tolist())


def text_ids(text: str) -> list[int]:
    """Return single-byte tokens with this text."""
    return [demo_tokens().index(bytes((byte,))) for byte in text.encode()]


def oracle(pattern: bytes, outputs: Sequence[int]) -> set[int]:
    """Return the tokens after which `pattern` can still match, and the end tokens where it matches."""
    compiled, before = regex.compile(pattern), demo_text(list(outputs))
    found = {
        token_id
        for token_id, text in enumerate(demo_tokens())
        if text is not None and compiled.fullmatch(before + text, partial=True)
    }
    return found.union(DEMO_EOS_TOKEN_IDS) if compiled.fullmatch(before) else found


ORACLES = (
    (of_regex(r"(ab|abc|b)*c?"), rb"(ab|abc|b)*c?"),
    (of_regex(r"[a-z]{3,9}"), rb"[a-z]{3,9}"),
    (of_regex(r"(true|false|null)"), rb"(true|false|null)"),
    (of_regex(r'"[^"\\\n\x00-\x1f\x7f-\x{10FFFF}]{0,20}"'), rb'"[^"\\\n\x00-\x1f\x7f-\xff]{0,20}"'),
    (of_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"), rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"),
    (of_regex(r"([0-9]{4}-[0-9]{2}-[0-9]{2}T){1,2}"), rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T){1,2}"),
    (of_regex(r"(naïve|café|日本|😀)+"), "(naïve|café|日本|😀)+".encode()),
    (of_regex(r"( the| a)( [a-z]+){2,5}\."), rb"( the| a)( [a-z]+){2,5}\."),
    (
        LLMatcher.grammar_from_json_schema(
            '{"properties": {"name": {"enum": ["x", "the"]}, "is": {"type": "boolean"}}, "required": ["name", "is"],'
            '"additionalProperties": false, "type": "object"}',
            overrides={"whitespace_flexible": False},
        ),
        rb'\{"name":"(x|the)","is":(true|false)\}',
    ),
    ('start: a | b\na: "the " b\nb: ("was" | "wa" b)', rb"(the )?(wa)*was"),
)


@pytest.mark.parametrize(("grammar", "byte_pattern"), ORACLES, ids=[str(pattern) for _, pattern in ORACLES])
def test_masks_equal_partial_matching_of_the_whole_vocabulary(grammar: str, byte_pattern: bytes) -> None:
    rng, rules = Random(byte_pattern), sampling(grammar)
    outputs: list[int] = []
    for _ in range(12):
        expected = oracle(byte_pattern, outputs)
        assert allowed(rules, outputs) == expected, demo_text(outputs)
        inner = sorted(expected.difference(DEMO_EOS_TOKEN_IDS))
        if not inner:
            break
        outputs.append(rng.choice(inner))
    assert outputs


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "long one"]}, "maxItems": 4},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def test_replayed_and_forked_matchers_give_the_masks_of_the_one_that_followed_every_token() -> None:
    rules, rng = sampling(LLMatcher.grammar_from_json_schema(SCHEMA)), Random(3)
    outputs: list[int] = []
    by_prefix: list[set[int]] = []
    followed = new_constraints()
    for _ in range(60):
        found = allowed(rules, outputs, by=followed)
        assert isinstance(found, set)
        by_prefix.append(found)
        if found <= set(DEMO_EOS_TOKEN_IDS):
            break
        outputs.append(rng.choice(sorted(found.difference(DEMO_EOS_TOKEN_IDS))))
    assert len(outputs) > 15
    json.loads(demo_text(outputs[: len(by_prefix) - 1]) if by_prefix[-1] <= set(DEMO_EOS_TOKEN_IDS) else b"{}")
    for count in range(len(by_prefix)):  # another worker, a preempted sequence, and a sample that forks off here
        assert allowed(rules, outputs[:count], by=new_constraints(DEMO_VOCAB_SIZE), seq_id=count) == by_prefix[count]
        assert allowed(rules, outputs[:count], by=followed, seq_id=100 + count) == by_prefix[count]
    other = outputs[:5]  # the same sequence with another history, as after a step that was discarded
    assert allowed(rules, other, by=followed) == by_prefix[5]
    assert allowed(rules, outputs[:9], by=followed) == by_prefix[9]


async def test_prepared_rules_continue_after_the_outputs_of_earlier_attempts() -> None:
    rules, outputs = sampling(of_regex("[ab]{300}c")), text_ids("ab" * 150)
    own = new_constraints()
    held = await own.prepare(rules, token_ids(outputs))
    assert allowed(rules, outputs, by=own) == set(text_ids("c"))
    assert allowed(rules, outputs[:299], by=own, seq_id=2) == {
        token_id for token_id, text in enumerate(demo_tokens()) if text in {b"a", b"b", b"ac", b"bc"}
    }
    del held
    own.close()


def test_padded_ids_are_never_allowed() -> None:
    everything = allowed(sampling(of_regex(r"(.|\n)*")))
    assert isinstance(everything, set)
    assert max(everything) < DEMO_VOCAB_SIZE
    named = sampling(f"start: <[{VOCAB_SIZE - 1}]> | <[{DEMO_VOCAB_SIZE}-{VOCAB_SIZE - 2}]> | <[1]>")
    assert allowed(named) == {IM_START}


DONE = sampling(of_regex("ab"))
OPEN = sampling(of_regex("(ab)+"))
AB = demo_tokens().index(b"ab")
A = demo_tokens().index(b"a")
B = demo_tokens().index(b"b")
X = demo_tokens().index(b"x")
BAB = demo_tokens().index(b"bab")


@pytest.mark.parametrize(
    ("rules", "outputs", "banned", "expected"),
    [
        (DONE, [], (), {A, AB}),
        (DONE, [AB], (), {0, 2}),
        (OPEN, [AB], (), {0, 2, A, AB}),
        (OPEN, [AB], (0, 2), {A, AB}),  # min_tokens is not reached
        (replace(OPEN, ignore_eos=True), [AB], (), {A, AB}),
        (replace(OPEN, ignore_eos=True, stop_token_ids=(2,)), [AB], (), {2, A, AB}),
        (replace(OPEN, stop_token_ids=(IM_START,)), [AB], (), {0, 1, 2, A, AB}),  # special: ends where eos may
        (replace(OPEN, stop_token_ids=(IM_START,)), [AB, A], (), {B, BAB}),
        (replace(OPEN, stop_token_ids=(AB,)), [], (), {A, AB}),  # text: drawn only where the grammar allows it
        (replace(DONE, stop_token_ids=(5,)), [AB], (), {0, 2}),
        (sampling('start: "a" <|im_end|> "b"'), [A], (), Reason.NO_TOKEN_LEFT),  # an end token cannot be inside
        (sampling('start: "a" <|im_start|> "b"'), [A], (), {IM_START}),
        (DONE, [AB], (0, 2), Reason.NO_TOKEN_LEFT),
        (replace(DONE, ignore_eos=True), [AB], (), Reason.NO_TOKEN_LEFT),
        (replace(DONE, allowed_token_ids=(A, 5)), [], (), {A}),
        (replace(DONE, allowed_token_ids=(5,)), [], (), Reason.NO_TOKEN_LEFT),
        (replace(DONE, bad_words=((A,),)), [], (), {AB}),
        (replace(DONE, bad_words=((A,), (AB,))), [], (), Reason.NO_TOKEN_LEFT),
        (sampling(allowed_token_ids=(3, 5, VOCAB_SIZE - 1)), [], (5,), {3, VOCAB_SIZE - 1}),
        (sampling("start: A\nA: /a/ & /b/"), [], (), Reason.NO_TOKEN_LEFT),  # matches nothing
        (DONE, [5, 6], (), Reason.NO_TOKEN_LEFT),  # the response does not match
    ],
)
def test_token_must_pass_all_rules_of_a_request(
    rules: Sampling, outputs: list[int], banned: tuple[int, ...], expected: set[int] | Reason
) -> None:
    found = allowed(rules, outputs, banned=banned)
    if isinstance(expected, Reason):
        assert isinstance(found, Failure)
        assert (found.reason, found.code, found.retriable) == (expected, Code.UNPROCESSABLE, False)
    else:
        assert found == expected


WORDS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=6)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(words=WORDS, outputs=st.lists(st.integers(1, 3), max_size=8), only=st.sets(st.integers(0, 5), max_size=4))
def test_bad_words_and_allowed_tokens_equal_their_definition(
    words: list[list[int]], outputs: list[int], only: set[int]
) -> None:
    rules = sampling(bad_words=tuple(map(tuple, words)), allowed_token_ids=tuple(sorted(only)))
    expected = {
        token_id
        for token_id in range(40)
        if (not only or token_id in only) and not any([*outputs, token_id][-len(word) :] == word for word in words)
    }
    if not rules.is_constrained:
        return
    found = allowed(rules, outputs, by=TokenConstraints(vocab_size=40))
    assert found == expected if expected else isinstance(found, Failure)


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    rules = sampling(bad_words=((PROMPT[-1], 5), (6, 5)))
    found = allowed(rules)
    assert isinstance(found, set)
    assert 5 in found
    found = allowed(rules, [6])
    assert isinstance(found, set)
    assert 5 not in found


def test_a_failing_row_leaves_the_others_alone() -> None:
    rows = [
        (1, request(sampling())),
        (2, request(DONE)),
        (3, request(replace(DONE, ignore_eos=True), [AB])),
        (4, request(sampling("start: x"))),
        (5, request(sampling(allowed_token_ids=(VOCAB_SIZE,)))),
        (6, request(OPEN, [AB])),
        (7, request(sampling(of_regex("[0-9]+")))),
    ]
    for own in (constraints(), new_constraints(num_threads=2)):
        masks = own.masks(rows)
        assert masks.rows == (1, 5, 6)
        assert [set(ids_of(bits).tolist()) for bits in masks.bits[:2]] == [{A, AB}, {0, 2, A, AB}]
        reasons = {row: failure.reason for row, failure in masks.failures.items()}
        assert reasons == {2: Reason.NO_TOKEN_LEFT, 3: Reason.INVALID_GRAMMAR, 4: Reason.INVALID_REQUEST}


EXPENSIVE = {
    "large": (of_regex("|".join(f"{number:016x}" for number in range(3900))), Reason.INVALID_GRAMMAR),
    "lexer": (of_regex("((.{0,100}){0,100}){0,100}"), Reason.NO_TOKEN_LEFT),
    "rules": (
        "start: r0\n"
        + "\n".join(f'r{i}: "a" r{i * 7 % 900} | "b" r{i * 13 % 900} | r{(i + 1) % 900}' for i in range(900)),
        Reason.NO_TOKEN_LEFT,
    ),
}


@pytest.mark.parametrize("name", EXPENSIVE)
async def test_grammar_beyond_the_limits_is_refused_before_it_runs(name: str) -> None:
    grammar, reason = EXPENSIVE[name]
    assert len(grammar) <= MAX_GRAMMAR_BYTES * (2 if name == "large" else 1)
    with pytest.raises(Refused) as refused:
        await constraints().prepare(sampling(grammar), token_ids())
    assert refused.value.failure.reason is reason
    assert not refused.value.failure.retriable


@pytest.mark.parametrize("name", ["mask", "token"])
def test_grammar_that_becomes_expensive_says_after_how_many_tokens(name: str) -> None:
    """A mask exceeds a limit in the first grammar, a token that its mask had allowed in the second."""
    grammar = of_regex("((a{0,100}){0,100}){0,100}") if name == "mask" else AMBIGUOUS
    rules, rng, outputs = sampling(grammar), Random(0), list[int]()
    for _ in range(500):
        found = allowed(rules, outputs)
        if isinstance(found, Failure):
            break
        outputs.append(A if name == "token" else rng.choice(sorted(found.difference(DEMO_EOS_TOKEN_IDS))))
    assert isinstance(found, Failure), "no limit"
    assert found.reason is Reason.NO_TOKEN_LEFT
    assert f"too expensive after {len(outputs)} tokens" in found.message
    if name == "token":  # also if more tokens are replayed at once
        executor = MatcherExecutor(demo_table().table)
        matcher = CompiledGrammar(grammar, demo_table()).start.copy()
        with pytest.raises(Refused, match=f"too expensive after {len(outputs)} tokens"):
            matcher.follow(token_ids([*outputs, A, A]), executor)


def test_schema_with_many_patterns_is_within_the_limits() -> None:
    kinds = [
        {
            "type": "object",
            "properties": {"v": {"type": "string", "pattern": f"^(ab|cd|[e-{end}]){{{n},{n + 30}}}x.*$"}},
        }
        for n, end in enumerate("fghijklmnopqrstuvwxyzfghijklmnopqrstuvwx")
    ]
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps({"anyOf": [kind | {"required": ["v"]} for kind in kinds]}), overrides={"whitespace_flexible": False}
    )
    outputs = text_ids('{"v":"')
    for _ in range(30):
        found = allowed(sampling(grammar), outputs)
        assert isinstance(found, set), found
        assert found
        outputs += text_ids("ab")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: x", "unknown name"),
        (of_regex("a("), "unclosed group"),
        ("{", "cannot be used"),
        ("\0", "cannot be used"),
    ],
)
async def test_invalid_grammar_is_refused_with_its_place(grammar: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        await constraints().prepare(sampling(grammar), token_ids())
    assert refused.value.failure.reason is Reason.INVALID_GRAMMAR


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), ("{", "Expecting"), ('{"model": {"vocab": {"a": 0}}}', ""), ("[]", "list indices")],
)
def test_worker_without_usable_tokenizer_refuses_grammars_only(
    content: str | None, problem: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    own = TokenConstraints(vocab_size=8, tokenizer=read_grammar_tokenizer(tmp_path, vocab_size=8))
    own.check(sampling(allowed_token_ids=(7,), bad_words=((1, 2),)))
    assert "supports no grammars" in own.load()
    for _ in range(2):
        with pytest.raises(Refused, match=f"supports no grammars.*{problem}") as refused:
            own.check(DONE)
        assert refused.value.failure.reason is Reason.INVALID_GRAMMAR


@pytest.mark.parametrize(
    "changes", [{"allowed_token_ids": (1, VOCAB_SIZE)}, {"bad_words": ((1, VOCAB_SIZE),)}, {"bad_words": ((),)}]
)
def test_rules_with_unknown_tokens_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        constraints().check(sampling(**changes))
    assert refused.value.failure.reason is Reason.INVALID_REQUEST


def test_caches_are_bounded() -> None:
    own = TokenConstraints(
        vocab_size=VOCAB_SIZE, tokenizer=read_grammar_tokenizer(DEMO_DIR, vocab_size=VOCAB_SIZE), in_threads=False
    )
    for number in range(MAX_CACHED_GRAMMARS + 3):
        assert allowed(sampling(of_regex(f"x{number}")), by=own)
    assert len(own._grammars) == MAX_CACHED_GRAMMARS
    assert len(own._unowned) == len(own._rules) == 16
    rules = sampling(of_regex("[ab]+"))
    for seq_id in range(MAX_MATCHERS + 2):
        allowed(rules, by=own, seq_id=seq_id)
    matchers = own._rules_of(rules).matchers
    assert matchers is not None
    assert len(matchers) == MAX_MATCHERS


def compiled_of(own: TokenConstraints, rules: Sampling) -> CompiledGrammar:
    matchers = own._rules_of(rules).matchers
    assert matchers is not None
    return matchers.compiled


def test_memory_of_grammars_is_bounded_by_what_their_masks_have_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    own = new_constraints()
    wide = [sampling(of_regex(f"[a-c]{{3,9}}{number}")) for number in range(4)]
    grammars = [compiled_of(own, rules) for rules in wide]
    for number, grammar in enumerate(grammars):
        grammar.count_mask(0.03 * (number + 1))
    total = sum(grammar.num_bytes for grammar in grammars)
    monkeypatch.setattr(token_constraints, "MAX_GRAMMAR_MEMORY", total - 1)
    monkeypatch.setattr(token_constraints, "MAX_CACHED_GRAMMAR_BYTES", grammars[-1].num_bytes + 1)
    assert allowed(sampling(of_regex("new")), by=own)
    assert list(own._grammars) == [of_regex("new")]
    assert sum(grammar.num_bytes for grammar in grammars) < total
    expected = allowed(wide[3], text_ids("ab"))
    assert allowed(wide[3], text_ids("ab"), by=own) == expected
    assert [grammar.generation for grammar in grammars] == [0, 0, 0, 1]
    grammars[3].count_mask(1000.0)
    assert grammars[3].num_bytes < 2 * MAX_LEXER_BYTES


FULL = of_regex(r"[\p{L}\p{N} ]{1,3000}")
"""Its lexer gets a new state with each character, and for each character that a token might bring."""


def test_full_lexer_is_replaced_and_does_not_fail_the_requests_that_share_it() -> None:
    own, rng = new_constraints(), Random(1)
    rules = sampling(FULL)
    words = [token for token, text in enumerate(demo_tokens()) if text is not None and text.isalpha()]
    for seq_id in (1, 2):
        outputs: list[int] = []
        while compiled_of(own, rules).generation < seq_id:
            found = allowed(rules, outputs, by=own, seq_id=seq_id)
            assert isinstance(found, set), found
            assert found.issuperset(words[:1])
            outputs.append(rng.choice(words))
            assert len(outputs) < 700
        assert allowed(rules, outputs, by=own, seq_id=seq_id) == allowed(rules, outputs, by=new_constraints())


def test_grammar_with_an_unusable_lexer_serves_the_next_request() -> None:
    rules = sampling(of_regex("((a{0,100}){0,100}){0,100}"))
    own = new_constraints()

    def tokens_until_failure(seq_id: int) -> int:
        outputs: list[int] = []
        while not isinstance(allowed(rules, outputs, by=own, seq_id=seq_id), Failure):
            outputs.append(A)
        return len(outputs)

    assert tokens_until_failure(1) == tokens_until_failure(2) > 0


def deferring_constraints() -> TokenConstraints:
    return TokenConstraints(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=DEMO_EOS_TOKEN_IDS,
        tokenizer=read_grammar_tokenizer(DEMO_DIR, vocab_size=VOCAB_SIZE, eos_token_ids=DEMO_EOS_TOKEN_IDS),
        num_threads=2,
        clocks=MaskClocks(wall_s=time.monotonic, cpu_s=time.thread_time),
    )


def masks_of_all(own: TokenConstraints, rows: Sequence[tuple[int, SampleRequest]]) -> TokenMasks:
    """Return the masks once none is deferred; threads may be late on a busy machine."""
    while (masks := own.masks(rows)).deferred:
        pass
    return masks


class HeldGrammars:
    """Lets the masks of grammars wait until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_compute, self.has_begun = threading.Event(), threading.Event()
        self.held: set[CompiledGrammar] = set()
        self.num_threads = 0

        def compute(compiled: CompiledGrammar, tasks: Sequence[MaskTask], executor: MatcherExecutor) -> None:
            if compiled in self.held:
                self.num_threads += 1
                self.has_begun.set()
                assert self.may_compute.wait(60)
            compute_masks(compiled, tasks, executor)

        monkeypatch.setattr(mask_tasks, "compute_masks", compute)


def test_slow_grammars_defer_only_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, also_slow = sampling(of_regex("[xy]+z")), sampling(of_regex("[xy]+w"))
    own, holding = deferring_constraints(), HeldGrammars(monkeypatch)
    for rules in (slow, also_slow):
        compiled_of(own, rules).count_mask(1.0)
        holding.held.add(compiled_of(own, rules))
    rows = [
        (1, request(slow, [X])),
        (2, request(OPEN, [AB])),
        (3, request(sampling(bad_words=((5,),)))),
        (4, request(also_slow, [X])),
    ]
    while (masks := own.masks(rows)).deferred != {0, 3}:  # the row of the other grammar may be late
        assert not masks.failures
    assert masks.rows == (1, 2)
    more = [(10 + number, request(slow, [X])) for number in range(8)]
    own.masks([*rows, *more])
    assert holding.has_begun.wait(60)
    assert holding.num_threads == 1  # for both grammars and all sequences
    holding.may_compute.set()
    masks = masks_of_all(own, rows)
    assert masks.rows == (0, 1, 2, 3)
    assert set(ids_of(masks.bits[0]).tolist()) == allowed(slow, [X])
    assert not own._rules_of(also_slow).pending
    own.close()


def test_masks_that_began_before_the_forward_pass_are_used_by_their_step_only() -> None:
    own = deferring_constraints()
    rows = [(1, request(OPEN, [AB])), (2, request(replace(DONE, allowed_token_ids=(A,)))), (3, request(sampling()))]
    other = [(4, request(DONE))]
    own.begin(rows)
    assert masks_of_all(own, rows).rows == (0, 1)
    own.begin(rows)  # a step that failed
    assert masks_of_all(own, other).rows == (0,)
    own.begin(other)
    masks = masks_of_all(own, rows)
    assert [set(ids_of(bits).tolist()) for bits in masks.bits] == [{0, 2, A, AB}, {A}]
    own.close()


def test_grammar_keeps_one_thread_however_many_sequences_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    held = sampling(of_regex("[xy]+z"))
    own, holding = deferring_constraints(), HeldGrammars(monkeypatch)
    holding.held.add(compiled_of(own, held))  # new: not known to be slow
    for number in range(3):
        own.masks([(number, request(held, [X]))])
    other = [(9, request(OPEN, [AB]))]
    assert masks_of_all(own, other).rows == (0,)
    assert holding.num_threads == 1
    holding.may_compute.set()
    assert masks_of_all(own, [(number, request(held, [X])) for number in range(3)]).rows == (0, 1, 2)
    own.close()


def test_masks_of_a_fast_grammar_are_computed_together_until_one_is_slow() -> None:
    own, rules = new_constraints(), sampling(of_regex("[xy]+z"))
    grammar = compiled_of(own, rules)
    assert (grammar.num_together, grammar.is_slow) == (1, False)
    grammar.count_mask(0.0, NUM_FAST_MASKS)
    assert grammar.num_together == MIN_TOGETHER
    outputs = [[X, *text_ids(text)] for text in ("", "x", "y", "xyxy")]
    for position in range(3):
        histories = [[*one, *[X] * position] for one in outputs]
        masks = own.masks([(row, request(rules, one)) for row, one in enumerate(histories)])
        for bits, one in zip(masks.bits, histories, strict=True):
            assert set(ids_of(bits).tolist()) == allowed(rules, one)
    grammar.count_mask(1.0)
    assert (grammar.num_together, grammar.is_slow) == (1, True)
    grammar.count_mask(0.0, NUM_FAST_AFTER_SLOW - 1)
    assert (grammar.num_together, grammar.is_slow) == (1, True)
    grammar.count_mask(0.0)
    assert (grammar.num_together, grammar.is_slow) == (MIN_TOGETHER, False)


def test_more_masks_are_computed_together_while_calls_are_quick() -> None:
    grammar = compiled_of(new_constraints(), OPEN)
    grammar.count_mask(0.0, NUM_FAST_MASKS)
    found = []
    for took_s in (0.0, 0.0, 0.0, 0.0, 2 * QUICK_S):
        found.append(grammar.num_together)
        grammar.count_call(took_s, grammar.num_together)
    assert found == [MIN_TOGETHER, 2 * MIN_TOGETHER, MAX_TOGETHER, MAX_TOGETHER, MAX_TOGETHER]
    assert grammar.num_together == MIN_TOGETHER
    grammar.count_call(0.0, MIN_TOGETHER - 1)  # a smaller batch proves nothing about a larger one
    assert grammar.num_together == MIN_TOGETHER
    grammar.count_call(SLOW_MASK_S + 1.5 * OVERHEAD_S, 2)  # perhaps because of other threads: measured one by one
    assert (grammar.num_together, grammar.is_slow) == (1, False)


def test_row_that_fails_among_others_fails_alone() -> None:
    for own in (new_constraints(), deferring_constraints()):
        compiled_of(own, OPEN).count_mask(0.0, 1000)
        histories = [[AB], [AB, AB], [A], [A, B]]
        masks_of_all(own, [(row, request(OPEN, one)) for row, one in enumerate(histories)])
        histories = [[*one, token] for one, token in zip(histories, (AB, X, B, X), strict=True)]
        masks = masks_of_all(own, [(row, request(OPEN, one)) for row, one in enumerate(histories)])
        assert masks.rows == (0, 2)
        assert {row: failure.reason for row, failure in masks.failures.items()} == {
            1: Reason.NO_TOKEN_LEFT,
            3: Reason.NO_TOKEN_LEFT,
        }
        assert "does not match its grammar after 2 tokens" in masks.failures[1].message
        own.close()


def test_error_in_a_thread_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    own = deferring_constraints()
    monkeypatch.setattr(mask_tasks, "compute_masks", broken)
    with pytest.raises(ZeroDivisionError):
        masks_of_all(own, [(1, request(OPEN, [AB]))])
    own.close()


def test_expensive_tokens_do_not_keep_the_gil() -> None:
    executor, matcher = MatcherExecutor(demo_table().table), CompiledGrammar(AMBIGUOUS, demo_table()).start.copy()
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0)

    counting, interval_s = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(100)  # no thread has to release the GIL
    try:
        counting.start()
        before = counted
        with pytest.raises(Refused, match="too expensive"):
            matcher.follow(token_ids([A] * 200), executor)
        assert counted > before
    finally:
        done.set()
        counting.join()
        sys.setswitchinterval(interval_s)


AMBIGUOUS = 'start: e\ne: e e e | e e | "a"'


def demo_table() -> GrammarTokenizer:
    return constraints()._load_tokenizer()
