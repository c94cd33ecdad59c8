"""Computes logprobs of prompt tokens from the logits of the positions before them.

The engine limits the rows of a step, so the memory of this does not grow with the length of a prompt.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from baton.core.request import PromptLogprobs
from baton.engine.state.step import PromptRequest
from baton.model.device.async_copy import download, upload


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPromptLogprobs:
    """Logprobs that the device is computing; on the host once it is done.

    requests: (seq_id, request), whose rows follow each other.
    chosen, ranks: [num_rows], of the prompt's own tokens.
    top_values, top_ids: [num_rows, most logprobs that a request asks for].
    """

    requests: Sequence[tuple[int, PromptRequest]]
    chosen: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def result(self) -> Mapping[int, PromptLogprobs]:
        """Return the logprobs by sequence. Call it after the device is done."""
        found, begin = {}, 0
        for seq_id, request in self.requests:
            rows, num_top = slice(begin, begin + len(request.targets)), min(request.num_logprobs, self.top_ids.shape[1])
            begin = rows.stop
            found[seq_id] = PromptLogprobs(
                num_top=num_top,
                chosen=array("f", self.chosen[rows].tolist()),
                ranks=array("I", self.ranks[rows].tolist()),
                top_ids=array("I", self.top_ids[rows, :num_top].flatten().tolist()),
                top_values=array("f", self.top_values[rows, :num_top].flatten().tolist()),
            )
        return found


def prompt_logprobs(logits: torch.Tensor, requests: Sequence[tuple[int, PromptRequest]]) -> PendingPromptLogprobs:
    """Start computing the logprobs of prompt tokens.

    logits: [num_rows, vocab_size], any float dtype; a row for each target of each request, in order.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    targets = np.fromiter(chain.from_iterable(request.targets for _, request in requests), dtype=np.int64)
    chosen = logprobs.gather(1, upload(targets, logits.device)[:, None])
    most = min(max(request.num_logprobs for _, request in requests), logits.shape[-1])
    top = logprobs.topk(most, dim=-1)
    return PendingPromptLogprobs(
        requests=requests,
        chosen=download(chosen[:, 0]),
        ranks=download((logprobs > chosen).sum(dim=-1) + 1),
        top_values=download(top.values),
        top_ids=download(top.indices),
    )
