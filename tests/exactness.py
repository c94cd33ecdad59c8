"""Checks that every token is right, by comparing answers with one teacher-forced transformers pass in
float32.

    checker = ExactnessChecker(model_dir)
    checker.check(answers)          # raises NotExact

Prompt and answer form the input of the pass. At every position, the answer's token must be the reference's
choice, or lie within tau of it. For sampled requests, the choice is the argmax of the reference's own logits
with keyed noise. The top logprobs must equal the reference's within tau. tau is ten times the largest
difference between two batchings of the reference on these answers, and at most 1e-4. More than one near-tie
in 5,000 tokens is a failure, too.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from baton.core.eos_token_ids import eos_token_ids
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling, TokenLogprobs
from baton.engine.state.sequence import end_token_ids
from baton.engine.state.step import SampleRequest
from baton.model.sampling.host_sampler import kept_token_ids, noise, processed_logits
from tests.scale import sized

MAX_TAU = 1e-4
TOKENS_PER_NEAR_TIE = 5_000
_MEASURED_ANSWERS = sized(2, 6)
_TOP_P_SLACK = 1e-6


class NotExact(AssertionError):
    """An answer contains a token or a logprob that the reference would not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sample as a client received it.

    logprobs: one per token, each with its top logprobs; empty if not requested.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    sample_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Result of a successful check. `worst_logprob` is the largest difference of a logprob."""

    num_tokens: int
    near_ties: int
    tau: float
    worst_logprob: float


class ExactnessChecker:
    """Computes the reference of one model directory with transformers' own attention, one sequence at a time.

    It runs on the same device as the answers that it checks.
    """

    def __init__(self, model_dir: Path, device: str = "cpu") -> None:
        attention = "sdpa"
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
        self._model.to(device).eval().requires_grad_(False)
        self._eos = eos_token_ids(model_dir)

    def check(self, answers: Sequence[Answer]) -> Exactness:
        """Check all answers. Raises NotExact with answer, position and values of the first wrong token or
        logprob."""
        if not any(answer.tokens for answer in answers):
            raise NotExact("there are no tokens to check")
        measured, rng = _measured(answers), random.Random(0)
        logits, rounding_noise = [], 0.0
        for number, answer in enumerate(answers):
            if number in measured:
                one_pass = self._all_logits(answer)
                rounding_noise = max(rounding_noise, self._rounding_noise(answer, one_pass, rng))
                logits.append(one_pass[len(answer.prompt) - 1 :][: len(answer.tokens)].clone().cpu())
            else:
                logits.append(self._logits(answer))
        tau = min(MAX_TAU, 10 * rounding_noise)
        near_ties, worst = 0, 0.0
        for number, (answer, rows) in enumerate(zip(answers, logits, strict=True)):
            for position, row in enumerate(rows):
                where = f"answer {number} (prompt of {len(answer.prompt)}, {answer.sampling}), output {position}"
                near_ties += not self._is_choice(answer, position, row.numpy(), tau, where)
            worst = max(
                worst, self._check_logprobs(answer, rows, tau, f"answer {number} (prompt of {len(answer.prompt)})")
            )
        num_tokens = sum(len(answer.tokens) for answer in answers)
        allowed = max(1, num_tokens // TOKENS_PER_NEAR_TIE)  # one near-tie may happen in any number of tokens
        if near_ties > allowed:
            raise NotExact(f"{near_ties} near-ties in {num_tokens} tokens, at most {allowed} can be chance")
        return Exactness(num_tokens=num_tokens, near_ties=near_ties, tau=tau, worst_logprob=worst)

    @torch.inference_mode()
    def _logits(self, answer: Answer) -> torch.Tensor:
        """Return the logits of each output position, [num_tokens, vocab_size], from one pass over prompt and
        answer."""
        tokens = torch.tensor([answer.prompt + answer.tokens[:-1]], device=self._model.device)
        rows = torch.arange(len(answer.prompt) - 1, tokens.shape[1], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False, logits_to_keep=rows).logits[0]
        return logits[: len(answer.tokens)].cpu()

    @torch.inference_mode()
    def _all_logits(self, answer: Answer) -> torch.Tensor:
        """Return the logits of each position from one pass over prompt and answer."""
        tokens = torch.tensor([answer.prompt + answer.tokens], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def _rounding_noise(self, answer: Answer, one_pass: torch.Tensor, rng: random.Random) -> float:
        """Return the largest difference of the reference from itself.

        It compares one pass with passes over a few tokens at a time, with transformers' cache.
        """
        tokens = torch.tensor([answer.prompt + answer.tokens], device=self._model.device)
        cache, done, largest = DynamicCache(config=self._model.config), 0, 0.0
        while done < tokens.shape[1]:
            # Single tokens at the end, as in decoding, and larger chunks before.
            left = tokens.shape[1] - done
            size = min(left, 1 if left < 24 else rng.choice((5, 33, left // 2, left - 20)))
            chunk = tokens[:, done : done + size]
            logits = self._model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0]
            largest = max(largest, float((logits - one_pass[done : done + size]).abs().max()))
            done += size
        return largest

    def _is_choice(self, answer: Answer, position: int, logits: np.ndarray, tau: float, where: str) -> bool:
        """Return True if the token is the reference's choice, False for a near-tie. Raises NotExact
        otherwise."""
        sampling, token = answer.sampling, answer.tokens[position]
        request = SampleRequest(
            sampling=sampling,
            sample_indices=(answer.sample_index,),
            position=len(answer.prompt) + position,
            history=token_ids(answer.prompt + answer.tokens[:position]),
            num_prompt_tokens=len(answer.prompt),
            banned_token_ids=end_token_ids(sampling, self._eos) if position < sampling.min_tokens else (),
        )
        processed = processed_logits(logits, request)
        if sampling.is_greedy:
            temperature, values, surely_kept, perhaps_kept_from = 1.0, processed, processed, -np.inf
        else:
            temperature = sampling.temperature
            values = processed / temperature + noise(
                sampling.seed, answer.sample_index, request.position, processed.shape[0]
            )
            surely_kept = np.where(
                processed >= _truncation_threshold(processed, request, -_TOP_P_SLACK) + tau, values, -np.inf
            )
            perhaps_kept_from = _truncation_threshold(processed, request, _TOP_P_SLACK) - tau
        kept = np.where(processed >= _truncation_threshold(processed, request, 0.0), values, -np.inf)
        if token == int(kept.argmax()):
            return True
        behind = float(surely_kept.max() - values[token]) * temperature
        if processed[token] < perhaps_kept_from or not behind <= tau:
            raise NotExact(
                f"{where}: token {token}, the reference has {int(kept.argmax())}; "
                f"it is {behind:.3g} behind (tau {tau:.3g})"
            )
        return False

    def _check_logprobs(self, answer: Answer, rows: torch.Tensor, tau: float, where: str) -> float:
        """Return the largest difference from the reference's logprobs. Raises NotExact if it is above tau."""
        if not answer.logprobs:
            return 0.0
        if len(answer.logprobs) != len(answer.tokens):
            raise NotExact(f"{where}: {len(answer.logprobs)} logprobs for {len(answer.tokens)} tokens")
        reference = torch.log_softmax(rows, dim=-1)
        worst = 0.0
        for position, (token, actual) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            row = reference[position]
            pairs = [(actual.logprob, float(row[token])), *((value, float(row[i])) for i, value in actual.top)]
            pairs += zip(
                [value for _, value in actual.top], row.topk(len(actual.top)).values.tolist(), strict=True
            )  # no more likely token may be missing
            worst = max(worst, *(abs(a - b) for a, b in pairs))
            if not worst <= tau:
                raise NotExact(
                    f"{where}, output {position}: a logprob differs by {worst:.3g} (tau {tau:.3g}); "
                    f"the answer has {actual}"
                )
        return worst


def _measured(answers: Sequence[Answer]) -> set[int]:
    """Choose the answers by which rounding is measured: of all lengths, the longest one included."""
    by_length = sorted(
        (number for number, answer in enumerate(answers) if answer.tokens),
        key=lambda number: -len(answers[number].prompt) - len(answers[number].tokens),
    )
    return set(by_length[:: max(1, len(by_length) // _MEASURED_ANSWERS)])


def _truncation_threshold(processed: np.ndarray, request: SampleRequest, more_top_p: float) -> float:
    """Return the lowest processed logit that top-k, top-p and min-p keep, with top-p changed by
    `more_top_p`."""
    sampling = request.sampling
    if sampling.is_greedy:
        return -np.inf
    if sampling.top_p < 1.0:
        request = replace(request, sampling=replace(sampling, top_p=min(1.0, max(0.0, sampling.top_p + more_top_p))))
    ids = kept_token_ids(processed / sampling.temperature, request)
    return -np.inf if ids is None else float(processed[ids].min())
