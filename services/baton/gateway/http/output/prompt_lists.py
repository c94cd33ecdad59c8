"""Formats the logprobs of prompts as JSON lists."""

from baton.core.kv.block_hash import TokenIds
from baton.core.request import PromptLogprobs
from baton.gateway.http.openai_logprobs import TokenNames, completion_prompt_logprobs, vllm_prompt_logprobs
from baton.gateway.http.output.json_list import JsonList
from baton.gateway.input.client_call import ClientCall

PROMPT_TOKENS_PER_PIECE = 32
"""Prompt tokens whose logprobs are formatted at a time, in about 2 ms if each has 20."""
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of the `logprobs` object of a completion, with one item per token."""


class PromptLists:
    """Logprobs of one prompt as JSON text.

    entries: in vLLM's form.
    echoed: in the form of completions, by the name of the list; empty without `echo`.
    """

    def __init__(self) -> None:
        self.entries = JsonList()
        self.echoed: dict[str, JsonList] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all text."""
        return self.entries.num_bytes + sum(each.num_bytes for each in self.echoed.values())

    def fill(self, call: ClientCall, names: TokenNames, ids: TokenIds, logprobs: PromptLogprobs | None) -> None:
        """Format the logprobs of a prompt, a few tokens at a time, so that other threads may run.

        logprobs: None for a prompt of one token, which has none.
        """
        logprobs = logprobs or PromptLogprobs(num_top=0)
        has_echo = call.output_options.echo and call.num_logprobs is not None
        self.echoed = {name: JsonList() for name in COMPLETION_LISTS} if has_echo else {}
        offset = 0
        for begin in range(0, len(ids), PROMPT_TOKENS_PER_PIECE):
            some = ids[begin : begin + PROMPT_TOKENS_PER_PIECE]
            if (num_top := call.output_options.prompt_logprobs) is not None:
                self.entries.extend(vllm_prompt_logprobs(names, some, logprobs, begin, num_top))
            if has_echo:
                named, offset = completion_prompt_logprobs(names, some, logprobs, begin, offset, call.num_logprobs)
                for name, items in self.echoed.items():
                    items.extend(named[name])
