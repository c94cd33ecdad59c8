"""From a packed step to logits: the one thing that differs between ways to run a model."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from baton.model.attention.paged_attention import STEP_ARGUMENT
from baton.model.step.step_inputs import PackedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """logits [num_samples, vocab_size], a row for each of the step's `sample_rows`; finite [num_tokens]:
    whether all that a token leaves is numbers, at least its keys and values (before they are normed and
    turned) and, if it is sampled from, its last hidden state. Both on the device, valid until the next step;
    nobody has waited for them. A value that is not a number in any layer's keys, values or activations of a
    token is one in what comes behind it, too: the token attends to itself, and the residual stream carries it
    on. So KV that is not numbers never leaves its sequence."""

    logits: torch.Tensor
    finite: torch.Tensor


class Forward(Protocol):
    """Writes the step's KV and computes what is asked for."""

    def __call__(self, step: PackedStep) -> Forwarded: ...

    def close(self) -> None:
        """Take out of the model what was put into it."""
        ...


def are_finite(hidden: torch.Tensor) -> torch.Tensor:
    """hidden [num_tokens, hidden_size] -> bool [num_tokens], on its device."""
    return torch.isfinite(hidden.float().sum(dim=-1))


class ModelForward:
    """The model's own code, whatever its architecture, with our attention inside."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._vocab_size = int(model.config.vocab_size)
        self._finite = torch.empty(0, dtype=torch.bool)
        self._handle = model.base_model.register_forward_hook(self._see)

    def __call__(self, step: PackedStep) -> Forwarded:
        logits, finite = self.compute(step.token_ids, step.position_ids, step.sample_rows, step.attention)
        return Forwarded(logits=logits, finite=finite)

    def compute(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, sample_rows: torch.Tensor, attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, finite) as in `Forwarded`, both on the device, for which nothing waits here. `attention`:
        the step, for `attend`."""
        arguments: dict[str, Any] = {
            "input_ids": token_ids[None],
            "position_ids": position_ids[None],
            "use_cache": False,
            STEP_ARGUMENT: attention,
        }
        if sample_rows.numel():
            logits = self._model(**arguments, logits_to_keep=sample_rows).logits[0]
        else:
            self._model.base_model(**arguments)
            logits = torch.empty(0, self._vocab_size, device=token_ids.device)
        return logits, self._finite

    def close(self) -> None:
        self._handle.remove()

    def _see(self, _module: torch.nn.Module, _arguments: object, output: Any) -> None:
        self._finite = are_finite(output[0][0])  # the hidden states come first in every base model's output
