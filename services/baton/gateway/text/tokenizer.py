"""Converts text to token ids and back.

`HfTokenizer` reads a model's `tokenizer.json`. `ByteTokenizer` has the same interface, for tests and the
simulator.
"""

import asyncio
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as RustTokenizer

from baton.core.errors import ModelError
from baton.core.kv.block_hash import TokenIds
from baton.core.tokenizer_fingerprint import TOKENIZER_FILE, tokenizer_fingerprint
from baton.gateway.output.formats import SpecialToken
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.chat_template import read_json
from baton.gateway.text.chat_templates import ChatTemplates
from baton.gateway.text.detokenizer import REPLACEMENT, BytesDetokenizer, Detokenizer, WindowDetokenizer
from baton.gateway.text.pre_tokens import Description, byte_level_alphabet, has_known_pre_tokens
from baton.gateway.text.template_style import TemplateStyle
from baton.gateway.text.text_encoder import text_encoder
from baton.gateway.text.text_pieces import TextCutter
from baton.gateway.text.tokenizer_info import tokenizer_info
from baton.runtime.process import loop_time

_PROBE_TEXTS = ("a", "0", ".", "\n")
"""Texts that show which special tokens surround a text. A vocabulary may lack some of them."""
PROMPT_TAIL_TOKENS = 6
"""Number of prompt ids on which the text of the first output token depends."""


class Tokenizer(Protocol):
    """A model's vocabulary and chat template."""

    fingerprint: str
    """Fingerprint of the vocabulary, which must equal that of the workers."""
    vocab_size: int
    """Prompts may contain ids below this. Some of them may have no text."""
    max_model_len: int | None
    """Longest context of the model; None if its files do not say."""
    added_tokens: Mapping[int, SpecialToken]
    """Tokens that were added to the vocabulary of text, by id. The special ones are hidden."""
    visible_tokens: Mapping[int, SpecialToken]
    """The same tokens, none of them hidden."""
    info: bytes
    """Description for clients, as a JSON object."""

    async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> TokenIds:
        """Return the token ids of a text. A long text does not block the event loop.

        max_tokens: once there are more, the rest of the text may be left out.

        Raises Refused (400) if the text has tens of thousands of characters in a row without the
        end of a word.
        """
        ...

    @property
    def chat_templates(self) -> ChatTemplates | None:
        """The model's chat templates; None if chats have a fixed form."""
        ...

    async def chat_text(self, prompt: ChatPrompt) -> str:
        """Return the text that the chat template makes of a chat, including special tokens.

        Many or long messages do not block the event loop. Raises Refused (400) if the model has no template,
        or if the template rejects the messages.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of these ids. An id without text becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, for logprobs. They may be only a part of a character."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return an incremental detokenizer for one sample's output after `prompt`."""
        ...

    def min_tokens_of(self, num_bytes: int) -> int:
        """Return a lower bound for the number of tokens of a text of `num_bytes` bytes of UTF-8."""
        ...

    def close(self) -> None:
        """Stop the tokenizer's threads."""
        ...


class HfTokenizer(Tokenizer):
    """Tokenizer of a model's `tokenizer.json`, with the ids of the `tokenizers` library."""

    def __init__(self, model_dir: Path) -> None:
        """Load the tokenizer of a model directory. Raises ModelError if there is no usable fast tokenizer."""
        self.model_dir = model_dir
        self.fingerprint = tokenizer_fingerprint(model_dir)
        try:
            self._rust = RustTokenizer.from_file(str(model_dir / TOKENIZER_FILE))
        except Exception as error:  # the library raises plain Exceptions
            raise ModelError(f"{model_dir / TOKENIZER_FILE} is not a valid tokenizer: {error}") from error
        self._rust.no_truncation()
        self._rust.no_padding()
        self._chat_templates = ChatTemplates.load(model_dir)
        model = read_json(model_dir / "config.json")
        model = {**model, **model.get("text_config", {})}
        self.vocab_size = int(model.get("vocab_size") or self._rust.get_vocab_size())
        length = model.get("max_position_embeddings")
        self.max_model_len = int(length) if length else None
        self.added_tokens = {
            id_: SpecialToken(token.content, hidden=token.special)
            for id_, token in self._rust.get_added_tokens_decoder().items()
        }
        self.visible_tokens = _visible(self.added_tokens)
        self._special = {id_ for id_, token in self.added_tokens.items() if token.hidden}
        serialized = self._rust.to_str()
        description: Description = json.loads(serialized)
        self._encoder = text_encoder(self._rust, serialized)
        self.info = tokenizer_info(
            model_dir, vocab_size=self.vocab_size, max_model_len=self.max_model_len, text_encoder=self._encoder.library
        )
        self._cutter = self._around = None
        if has_known_pre_tokens(description):
            self._cutter = TextCutter(_added_tokens(self._rust))
            self._around = special_tokens_around(self._rust)
        self._table = _bytes_table(self._rust, description)
        self._plain_table = self._table and [
            b"" if id_ in self._special else token for id_, token in enumerate(self._table)
        ]
        self._max_token_bytes = _max_token_bytes(description, self._table)
        self._encode_threads = ThreadPoolExecutor(self._encoder.num_threads, thread_name_prefix="tokenizer")
        self._render_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="chat-template")

    async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> TokenIds:
        if len(text) <= self._encoder.loop_characters:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._encode_threads, self._encode_long, text, add_special_tokens, max_tokens
        )

    @property
    def chat_templates(self) -> ChatTemplates:
        return self._chat_templates

    async def chat_text(self, prompt: ChatPrompt) -> str:
        is_small = (
            len(prompt.messages) <= loop_time.TEMPLATE_MESSAGES
            and prompt.num_characters <= loop_time.TEMPLATE_CHARACTERS
        )
        if is_small and self._chat_templates.is_compiled(prompt):
            template = self._chat_templates.of(prompt)
            text = template.render_within(prompt, time.thread_time, loop_time.TEMPLATE_S)
            if text is not None:
                return text
        return await asyncio.get_running_loop().run_in_executor(self._render_threads, self._render, prompt)

    def _render(self, prompt: ChatPrompt) -> str:
        return self._chat_templates.of(prompt).render(prompt, time.thread_time)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.put, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        if self._table is not None:
            token = self._table[token_id] if token_id < len(self._table) else None
            return REPLACEMENT.encode() if token is None else token
        text = self._rust.id_to_token(token_id)
        if text is None:
            return REPLACEMENT.encode()
        if len(text) == 6 and text.startswith("<0x"):  # a token for a single byte, used as fallback
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        table = self._plain_table if skip_special_tokens else self._table
        if table is not None:
            return BytesDetokenizer(table)

        def decode(ids: Sequence[int]) -> str:
            return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(
            decode, self._has_text, [id_ for id_ in prompt[-PROMPT_TAIL_TOKENS:] if self._has_text(id_)]
        )

    def min_tokens_of(self, num_bytes: int) -> int:
        return num_bytes // self._max_token_bytes if self._max_token_bytes else 0

    def close(self) -> None:
        for threads in (self._encode_threads, self._render_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _encode_long(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> TokenIds:
        """Return the token ids of a long text, in pieces if the tokenizer is known to allow it."""
        if self._cutter is None or self._around is None:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        before, after = self._around if add_special_tokens else (array("I"), array("I"))
        ids = before[:]
        for piece in self._cutter.pieces(text):
            ids += self._encoder.encode(piece, add_special_tokens=False)
            if max_tokens is not None and len(ids) > max_tokens:
                return ids
        return ids + after

    def _has_text(self, token_id: int) -> bool:
        return self._rust.id_to_token(token_id) is not None


class ByteTokenizer(Tokenizer):
    """Tokenizer with one token per byte. An id above 255 has the text `<id>`, except the last one, which has
    none."""

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        max_model_len: int | None = 4096,
        chat_templates: ChatTemplates | None = None,
        added_tokens: Mapping[int, SpecialToken] | None = None,
    ) -> None:
        """Create a tokenizer. Without `chat_templates`, chats have a fixed form.

        `added_tokens` replace the texts of their ids.
        """
        self.fingerprint = "bytes"
        self._chat_templates = chat_templates
        self.added_tokens = added_tokens or {}
        self.visible_tokens = _visible(self.added_tokens)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.info = b'{"tokenizer_class": "ByteTokenizer"}'
        self._table = [bytes((id_,)) if id_ < 256 else f"<{id_}>".encode() for id_ in range(vocab_size - 1)]
        for id_, token in self.added_tokens.items():
            self._table[id_] = token.text.encode()

    async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> TokenIds:
        return array("I", list(text.encode()))  # array() would interpret bytes as the memory of its items

    @property
    def chat_templates(self) -> ChatTemplates | None:
        return self._chat_templates

    async def chat_text(self, prompt: ChatPrompt) -> str:
        if self._chat_templates is not None:
            template = self._chat_templates.of(prompt)
            return await loop_time.call(
                prompt.num_characters,
                loop_time.TEMPLATE_CHARACTERS,
                lambda: template.render(prompt, time.thread_time),
            )
        messages = TemplateStyle().adapted(prompt.messages)
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.put, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if token_id < len(self._table) else REPLACEMENT.encode()

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        return BytesDetokenizer(self._table)

    def min_tokens_of(self, num_bytes: int) -> int:
        return num_bytes

    def close(self) -> None:
        pass


def _bytes_table(rust: RustTokenizer, description: Description) -> list[bytes | None] | None:
    """Return the bytes of each token id if the tokenizer is byte-level; None otherwise.

    In a byte-level tokenizer, a token's text does not depend on its neighbors.
    """
    decoder = description["decoder"]
    if not decoder or decoder["type"] != "ByteLevel":
        return None
    byte_of = {character: byte for byte, character in byte_level_alphabet().items()}
    names = {id_: name for name, id_ in rust.get_vocab(with_added_tokens=True).items()}
    return [_token_bytes(names[id_], byte_of) if id_ in names else None for id_ in range(max(names) + 1)]


def _visible(tokens: Mapping[int, SpecialToken]) -> Mapping[int, SpecialToken]:
    return {id_: SpecialToken(token.text, hidden=False) for id_, token in tokens.items()}


def _added_tokens(rust: RustTokenizer) -> frozenset[str]:
    return frozenset(token.content for token in rust.get_added_tokens_decoder().values())


def special_tokens_around(rust: RustTokenizer) -> tuple[TokenIds, TokenIds]:
    """Return the ids of the special tokens that the tokenizer adds before and after every text.

    If its vocabulary has none of the probe texts, all of them count as those before. Raises ModelError if a
    text has other tokens between special ones than alone.
    """
    text = next((text for text in _PROBE_TEXTS if rust.encode(text, add_special_tokens=False).ids), "")
    plain, full = (rust.encode(text, add_special_tokens=wanted).ids for wanted in (False, True))
    if not plain:
        return array("I", full), array("I")
    begin = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), None)
    if begin is None:
        raise ModelError(
            f"the tokenizer encodes {text!r} as {full} with special tokens and as {plain} without; "
            "such a post-processor is not supported"
        )
    return array("I", full[:begin]), array("I", full[begin + len(plain) :])


def _token_bytes(name: str, byte_of: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level token. An added token contains other characters and is its own
    text."""
    try:
        return bytes([byte_of[character] for character in name])
    except KeyError:
        return name.encode()


def _max_token_bytes(description: Description, table: Sequence[bytes | None] | None) -> int:
    """Return the length of the longest token; 0 if a normalizer can shorten text before it is tokenized."""
    if table is None or description["normalizer"] is not None:
        return 0
    return max(len(token) for token in table if token is not None)
