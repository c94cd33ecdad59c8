"""`instructor`: extraction by tools and by JSON schema."""

import instructor
import openai
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, Weather

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Weather,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        seed=7,
    )
    assert isinstance(answer, Weather), (mode, answer)
