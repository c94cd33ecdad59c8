"""Generates prompts as text, for servers that accept nothing else.

A generated segment of n tokens becomes n words, drawn like its tokens (`loadgen.plan.prompt_tokens`) but from
words. So whatever a plan shares as tokens is shared as text. With words that are one token each in the
server's tokenizer (`loadgen.plan.vocabulary.words_of`), a prompt has the planned number of tokens plus what
the server adds (a start token, a chat template). With `COMMON_WORDS` this is nearly so for most tokenizers.
The report shows the deviation from the server's reported usage.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import AnswerOf, Generated, Plan, PlannedRequest, Segment, Text
from loadgen.plan.prompt_tokens import Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Words for prompts. `lead` is put before a text so that its first word is one token, too."""

    words: tuple[str, ...]
    lead: str = ""


COMMON_WORDS = Words(
    words=tuple(
        """
        about above after again air all also always and animal another answer any are around ask away back
        base because been before began begin being below best better between big black blue boat body book
        both boy build but call came can car carry center certain change check children city class clear close
        cold come common complete contain correct could country course cover cut dark day did different direct
        distance does dog done door down draw dream drive dry each ear early earth ease east eat end enough
        even ever every example eye face fact fall family far farm fast father feel feet few field figure fill
        final find fine fire first fish five fly follow food foot force form found four free friend from front
        full game gave general get girl give gold good got govern great green ground group grow had half hand
        happen hard has have head hear heard heat help her here high him his hold home horse hot hour house
        how hundred idea island just keep kind king knew know land language large last late laugh lay lead
        learn leave left less let letter life light like line list listen little live long look lost love low
        machine made main make man many map mark may mean measure men might mile mind minute miss money moon
        more morning most mother mountain move much music must name near need never new next night north note
        nothing notice noun now number numeral object off often oil old once one only open order other our out
        over own page paper part pass pattern people person picture piece place plain plan plane plant play
        point port pose possible pound power press problem produce product pull put question quick rain ran
        reach read ready real record red remember rest right river road rock room round rule run said same saw
        say school science sea second see seem self sentence serve set several shape she ship short should
        show side simple since sing size sleep slow small snow some song soon sound south special spell stand
        star start state stay step still stood stop story street strong study such sun sure surface system
        table tail take talk teach tell ten test than that the their them then there these they thing think
        this those though thought thousand three through time together told too took top toward town travel
        tree true try turn two under unit until upon use usual very voice vowel wait walk want war warm was
        watch water way week weight well went were west what wheel when where which while white who whole why
        will wind with wonder wood word work world would write year yes yet you young your
        """.split()
    )
)
"""Short, common English words. With a space before it, each is one token in nearly every large vocabulary."""


def text_of(plan: Plan, request: PlannedRequest, answers: Mapping[int, str], words: Words = COMMON_WORDS) -> str:
    """Return the full prompt. `answers` has the response texts that its `AnswerOf` segments refer to.

    Raises BadPlan for a prompt with exact token ids, KeyError for a missing response.
    """
    if isinstance(request.segments[0], Text):
        return "".join(segment.text for segment in request.segments if isinstance(segment, Text))
    return words.lead + " ".join(segment_text(plan, segment, answers, words) for segment in request.segments)


def segment_text(plan: Plan, segment: Segment, answers: Mapping[int, str], words: Words = COMMON_WORDS) -> str:
    """Return one part of a prompt, without the space between parts. Raises like `text_of`."""
    match segment:
        case Generated(segment_id=segment_id, num_tokens=num_tokens):
            chosen = _choices(len(words.words), plan.seed).of([segment_id], [num_tokens]).tolist()
            return " ".join([words.words[choice] for choice in chosen])
        case AnswerOf(index=index):
            return answers[index].strip(" ")
        case Text(text=text):
            return text
    raise BadPlan("exact token ids cannot be sent as text; send the plan with --prompts ids")


def warm_up_text(plan: Plan, number: int, num_tokens: int, words: Words = COMMON_WORDS) -> str:
    """Return the prompt of warm-up request `number`. No generated prompt of the plan begins with its first
    word."""
    return words.lead + " ".join(
        words.words[choice] for choice in _choices(len(words.words), plan.seed).warm_up(number, num_tokens).tolist()
    )


@functools.lru_cache(maxsize=8)
def _choices(size: int, seed: int) -> Choices:
    return Choices(size, seed)
