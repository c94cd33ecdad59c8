"""Formats the logprobs of prompts that the first events of a stream repeat."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from baton.core.client_api import ChoiceDelta
from baton.core.request import PromptLogprobs
from baton.gateway.http.asgi_io import in_pieces
from baton.gateway.http.openai_logprobs import TokenNames
from baton.gateway.http.output.prompt_lists import PROMPT_TOKENS_PER_PIECE, PromptLists
from baton.gateway.input.client_call import ClientCall


class FormattedPrompts:
    """Formats the logprobs of each prompt once, and holds the output of its choices until then.

    Those of a long prompt are formatted in a thread. Close it when the last event was added.
    """

    def __init__(self, call: ClientCall, names: TokenNames, put: Callable[[ChoiceDelta], None]) -> None:
        """Start with no prompt. `put` takes the output of choices whose prompt is formatted."""
        self._call = call
        self._names = names
        self._put = put
        self._pieces: dict[int, Mapping[str, Sequence[bytes]]] = {}
        self._held: dict[int, list[ChoiceDelta]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def put(self, choice: ChoiceDelta) -> None:
        """Pass new output on, or hold it. Raises what `put` has raised for output that was held."""
        prompt = choice.index // self._call.n
        if prompt in self._pieces:
            self._put(choice)
            return
        held = self._held.setdefault(prompt, [])
        held.append(choice)
        if prompt in self._tasks:
            if self._tasks[prompt].done():
                self._tasks[prompt].result()
            return
        num_tokens = len(self._call.requests[prompt].token_ids)
        if choice.prompt_logprobs is None and num_tokens > 1:
            return  # they come with the output of another choice
        if num_tokens > PROMPT_TOKENS_PER_PIECE:
            self._tasks[prompt] = asyncio.create_task(self._format_in_thread(prompt, choice.prompt_logprobs))
        else:
            self._pass_on(prompt, self._formatted(prompt, choice.prompt_logprobs))

    def lists(self, choice: ChoiceDelta) -> Mapping[str, Sequence[bytes]]:
        """Return the items of each list of the prompt's `logprobs` object, in pieces."""
        return self._pieces[choice.index // self._call.n]

    async def wait(self) -> None:
        """Wait until all output is passed on. Raises what `put` has raised."""
        for task in self._tasks.values():
            await task

    def close(self) -> None:
        """Drop the prompts and what is held."""
        for task in self._tasks.values():
            task.cancel()
            if task.done() and not task.cancelled():
                task.exception()  # it was raised already, or the call has failed for another reason
        self._pieces = {}
        self._held.clear()
        self._tasks = {}

    async def _format_in_thread(self, prompt: int, logprobs: PromptLogprobs | None) -> None:
        self._pass_on(prompt, await asyncio.to_thread(self._formatted, prompt, logprobs))

    def _pass_on(self, prompt: int, pieces: Mapping[str, Sequence[bytes]]) -> None:
        self._pieces[prompt] = pieces
        for choice in self._held.pop(prompt):
            self._put(choice)

    def _formatted(self, prompt: int, logprobs: PromptLogprobs | None) -> Mapping[str, Sequence[bytes]]:
        lists = PromptLists()
        lists.fill(self._call, self._names, self._call.requests[prompt].token_ids, logprobs)
        return {name: [*in_pieces([items.text])] for name, items in lists.echoed.items()}
