"""Finds the text part of a composite checkpoint, such as a model for images and text, and how to load it
alone.

Its weights are those under `language_model`, in any of the layouts that transformers has written, and the
output layer. All others, such as those for images, are neither loaded nor counted.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from baton.core.errors import ModelError

KEY_MAPPING = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.": "model.",
}
"""Renames weights of the text part to those of a language model alone; `key_mapping` of `from_pretrained`."""
_TEXT = re.compile(r"model\.(embed_tokens|layers|norm)\.|lm_head\.")
HEAD = "lm_head."
"""Begin of the names of the output layer's tensors. Quantised ones have others than `weight`."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text part, or the configuration itself if it is of text only.

    The text part gets the quantization_config of the whole. Raises ModelError if it has several text parts.
    """
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(f"{config.model_type} has several text parts; one must be served: {error}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    return text


def own_name(name: str) -> str | None:
    """Return the name of a checkpoint's weight in the language model alone, or None if it is of another
    part."""
    for pattern, replacement in KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name if _TEXT.match(name) else None


def has_own_head(names: Iterable[str]) -> bool:
    """True if a checkpoint with these weights has an output layer that is not the embedding."""
    return any((own_name(name) or "").startswith(HEAD) for name in names)


def text_model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return a language model for a text part that transformers runs only inside a composite model.

    It is transformers' own text model with an output layer. None if there is no such text model.
    """
    if type(config) not in MODEL_MAPPING:
        return None
    text_class = cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])
    parent = cast(Any, text_class.__mro__[1])
    if not (isinstance(parent, type) and issubclass(parent, PreTrainedModel)):
        return None

    class TextForCausalLM(parent, GenerationMixin):  # type: ignore[misc,valid-type]
        """A text model with an output layer."""

        base_model_prefix = "model"
        config_class = type(config)
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # as transformers has it

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = text_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **arguments: Any
        ) -> CausalLMOutputWithPast:
            output: BaseModelOutputWithPast = self.model(input_ids=input_ids, **arguments)
            hidden = output[0]
            rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutputWithPast(logits=_finish_logits(self.lm_head(hidden[:, rows]), self.config))

    TextForCausalLM.__name__ = f"{text_class.__name__.removesuffix('Model')}ForCausalLM"
    return TextForCausalLM


def _finish_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return logits after the factor and the soft cap that a composite model applies (Muse Spark)."""
    if (factor := getattr(config, "output_multiplier", None)) is not None:
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
