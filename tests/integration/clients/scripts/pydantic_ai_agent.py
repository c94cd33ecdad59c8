"""`pydantic-ai`: an agent with a tool and a typed result, over chat completions and over responses."""

from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, Weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
SETTINGS = {"max_tokens": MAX_TOKENS, "seed": 11, "temperature": 0.7}

for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        settings = SETTINGS if isinstance(model, OpenAIChatModel) else {"max_tokens": MAX_TOKENS, "temperature": 0.7}
        result = Agent(model, output_type=output, model_settings=settings, retries=0).run_sync(QUESTION)
        assert isinstance(result.output, Weather), (model, output, result.output)
