"""A batch: answers each line of a file, several at a time, behind all interactive requests.

    python examples/batch.py examples/questions.txt --out answers.jsonl

Requests have a low priority, so other clients go first. If the cluster is full, the openai client waits as
long as `Retry-After` says. Lines that `--out` already has are skipped, so an interrupted batch continues.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import TextIO

from openai import AsyncOpenAI, OpenAIError

LOW_PRIORITY = 10
"""Requests with a lower number go first. The default is 0."""


async def answer_line(client: AsyncOpenAI, model: str, number: int, question: str) -> dict[str, object]:
    """Return the line of the output: the answer, or the error."""
    try:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=100,
            extra_body={"priority": LOW_PRIORITY},
        )
    except OpenAIError as error:
        return {"line": number, "question": question, "error": str(error)}
    return {"line": number, "question": question, "answer": answer.choices[0].message.content}


async def run(client: AsyncOpenAI, questions: dict[int, str], out: TextIO, num_parallel: int) -> int:
    """Answer questions by line number, and write each result as soon as it is there. Returns how many failed."""
    model = (await client.models.list()).data[0].id
    slots = asyncio.Semaphore(num_parallel)

    async def one(number: int, question: str) -> bool:
        async with slots:
            result = await answer_line(client, model, number, question)
        print(json.dumps(result), file=out, flush=True)
        return "error" in result

    return sum(await asyncio.gather(*(one(number, question) for number, question in questions.items())))


def lines_done(out: Path) -> set[int]:
    """Return the numbers of the lines that an earlier run has answered."""
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {each["line"] for each in results if "answer" in each}


def main() -> None:
    """Answer the lines of the file on the command line."""
    parser = argparse.ArgumentParser(description="Answer each line of a file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("answers.jsonl"), help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=8, help="requests at a time; default: %(default)s")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    questions = dict(enumerate(arguments.file.read_text().splitlines(), 1))
    before = lines_done(arguments.out)
    missing = {number: question for number, question in questions.items() if number not in before}
    client = AsyncOpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=10)
    began_s = time.monotonic()
    with arguments.out.open("a") as out:
        num_failed = asyncio.run(run(client, missing, out, arguments.parallel))
    print(f"{len(questions) - num_failed} of {len(questions)} lines in {arguments.out}, ", end="")
    print(f"{len(before)} of them from before, {num_failed} failed, {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
