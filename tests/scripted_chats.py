"""A tokenizer with special tokens and a chat template, and stub workers that write a given text."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.gateway.output.formats import SpecialToken
from baton.gateway.text.chat_templates import ChatTemplates
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.unit.gateway.fakes import Cluster

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
FIRST_ADDED = 300
HIDDEN = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
VISIBLE = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
ADDED = {
    FIRST_ADDED + number: SpecialToken(text, hidden=text in HIDDEN) for number, text in enumerate((*HIDDEN, *VISIBLE))
}
_IDS = {token.text: id_ for id_, token in ADDED.items()}
_ADDED = re.compile("(" + "|".join(map(re.escape, _IDS)) + ")")


def chat_tokenizer(family: str) -> ByteTokenizer:
    """Return a tokenizer of bytes with the special tokens and the chat template of a family."""
    source = (TEMPLATES / f"{family}.jinja").read_text("utf-8")
    return ByteTokenizer(
        vocab_size=512,
        chat_templates=ChatTemplates({"default": source}, {"bos_token": "", "eos_token": ""}),
        added_tokens=ADDED,
    )


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    ids: list[int] = []
    for part in _ADDED.split(text):
        ids += [_IDS[part]] if part in _IDS else list(part.encode())
    return ids


def write(cluster: Cluster, *answers: str) -> None:
    """Let the workers write these answers, one for each sample, and end. They take no time for a token."""
    ids = [ids_of(answer) for answer in answers]

    def token_at(prompt: Sequence[int], sample: int, index: int) -> int:
        return ids[sample][index]

    for worker in cluster.scheduler.workers:
        at: Callable[[Sequence[int], int, int], int] = token_at
        worker.token_at = at
        worker.step_s = 0.0
        worker.finish_at = len(ids[0])
        worker.sample_finish_at = {sample: len(each) for sample, each in enumerate(ids)}
