"""An agent loop: the model may use tools before it answers.

    python examples/agent.py "How much is 17 * 23?"

Baton has no `tools` field yet, so an action is one line of JSON in the model's text. A reply without an
action is the answer. To choose actions takes a model that follows instructions, such as Qwen/Qwen3-0.6B. The
demo model knows what functions of Python's standard library do, and answers at once.
"""

import argparse
import ast
import json
import operator
import os
import pydoc
import re

from openai import OpenAI

INSTRUCTIONS = """You may use tools before you answer. To use one, reply with one line of JSON only:
{"tool": "calculate", "input": "2 * 21"}    computes an arithmetic expression
{"tool": "python_help", "input": "os.path.join"}    returns the documentation of a Python name
You then get the result. When you know the answer, reply with it, in one sentence."""
MAX_ACTIONS = 5
DOCUMENTED = ("json", "math", "os", "shutil")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Compute sums and products of numbers. Nothing else is evaluated, whatever the model writes."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](value(left), value(right))
        raise ValueError("only numbers, + - * / and parentheses")

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def python_help(name: str) -> str:
    """Return the beginning of a name's documentation. To look a name up is to import its module."""
    if name.partition(".")[0] not in DOCUMENTED:
        raise ValueError(f"only names of {', '.join(DOCUMENTED)}")
    return pydoc.plain(pydoc.render_doc(name))[:500]


TOOLS = {"calculate": calculate, "python_help": python_help}


def action_in(reply: str) -> tuple[str, str] | None:
    """Return (tool, input) of the first action in a reply, or None if it has none."""
    for line in re.findall(r"\{.*\}", reply):
        try:
            found = json.loads(line)
            return found["tool"], str(found["input"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def use(tool: str, argument: str) -> str:
    """Return a tool's result. The model sees errors, too, and may try again."""
    try:
        return TOOLS[tool](argument)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def run(client: OpenAI, model: str, question: str) -> str:
    """Answer a question with at most `MAX_ACTIONS` actions."""
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    reply = ""
    for _ in range(MAX_ACTIONS + 1):
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=200)
        reply = answer.choices[0].message.content or ""
        action = action_in(reply)
        if action is None:
            return reply.strip()
        result = use(*action)
        print(f"action  {action[0]}({action[1]!r}) -> {result!r:.80}")
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"Result: {result}"}]
    return f"no answer after {MAX_ACTIONS} actions; the last reply was: {reply}"


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description="Answer a question with tools.")
    parser.add_argument("question", nargs="?", default="What does os.getcwd do?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"answer  {run(client, model, arguments.question)}")


if __name__ == "__main__":
    main()
