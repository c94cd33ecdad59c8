"""Questions about one document, which is computed once: a RAG prompt with a shared prefix.

    python examples/rag.py json "What does json.dumps do?" "What does json.loads do?"

The prompt has the instructions first, then the document, then the question. So all questions about a document
have the same beginning, and Baton computes its KV once. The output says how many prompt tokens were cached.
Here the document is the help page of a Python module, so that the demo model answers sensibly.
"""

import argparse
import os
import pydoc

from openai import OpenAI

INSTRUCTIONS = "Answer the question from this page. Reply with one sentence."
MAX_PAGE_CHARS = 2500


def retrieve(module: str) -> str:
    """Return the page to answer from. A real program asks an index here, and keeps the order of what it finds."""
    return pydoc.plain(pydoc.render_doc(module))[:MAX_PAGE_CHARS]


def ask(client: OpenAI, model: str, page: str, question: str) -> tuple[str, int, int]:
    """Return the answer, the number of prompt tokens, and how many of them were cached."""
    messages = [
        {"role": "system", "content": f"{INSTRUCTIONS}\n\n{page}"},  # equal for all questions about the page
        {"role": "user", "content": question},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=100)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return (answer.choices[0].message.content or "").strip(), usage.prompt_tokens, cached or 0


def main() -> None:
    """Answer the questions of the command line."""
    parser = argparse.ArgumentParser(description="Answer questions about the help page of a Python module.")
    parser.add_argument("module", nargs="?", default="json")
    parser.add_argument("questions", nargs="*", help="default: two questions about json")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    page = retrieve(arguments.module)
    for question in arguments.questions or ["What does json.dumps do?", "What does json.loads do?"]:
        answer, num_prompt_tokens, num_cached = ask(client, model, page, question)
        print(f"{question}\n  {answer}\n  {num_cached} of {num_prompt_tokens} prompt tokens were cached")


if __name__ == "__main__":
    main()
