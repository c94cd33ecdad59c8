"""Defines the forward pass, from a packed step to logits, and implements it with the model's own code."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from baton.model.attention.paged_attention import STEP_ARGUMENT
from baton.model.step.step_inputs import PackedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Result of one forward pass, on the device. The device may still be computing it.

    It is valid until the next step.
    logits: [num_samples, vocab_size], one row for each of the step's `sample_rows`.
    finite: bool [num_tokens], False if a token's KV contains NaN or infinity. It covers at least the last
    layer's keys and values (before norm and RoPE) and, for a sampled token, its last hidden state.

    Checking the last layer is enough. A token attends to itself and the residual stream carries its values
    on, so NaN in any layer of a token reaches its last layer. Therefore no non-finite KV leaves its sequence
    unnoticed.
    """

    logits: torch.Tensor
    finite: torch.Tensor


class Forward(Protocol):
    """Writes the KV of a step's tokens to the cache and computes the logits of its sample rows."""

    def __call__(self, step: PackedStep) -> ForwardOutput: ...

    def close(self) -> None:
        """Remove from the model the hooks or replacements that this pass installed."""
        ...


def are_finite(hidden: torch.Tensor) -> torch.Tensor:
    """Return for each row of `hidden` [num_tokens, hidden_size] whether all values are finite: bool
    [num_tokens]."""
    return torch.isfinite(hidden.float().sum(dim=-1))


class ModelForward:
    """Runs the model's own code, of any architecture, with paged attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._vocab_size = int(model.config.vocab_size)
        self._finite = torch.empty(0, dtype=torch.bool)
        self._handle = model.base_model.register_forward_hook(self._see)

    def __call__(self, step: PackedStep) -> ForwardOutput:
        logits, finite = self.compute(step.token_ids, step.position_ids, step.sample_rows, step.attention)
        return ForwardOutput(logits=logits, finite=finite)

    def compute(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, sample_rows: torch.Tensor, attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model and return (logits, finite) as in `ForwardOutput`, without waiting for the device.

        `attention`: the step, which `paged_attention.attend` receives as a keyword argument.
        """
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
        self._finite = are_finite(output[0][0])  # every base model returns the hidden states first
