"""Semantic Kernel at Weft's server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Sky(BaseModel):
    clear: bool


class Weather:
    @kernel_function(description="Return the weather of a city.")
    def weather(self, city: str) -> str:
        return f"The sky of {city} is clear."


@pytest.mark.client("semantic-kernel", "tools with structured output")
def test_answer_with_tools_and_a_schema_fits_the_schema(server: Any) -> None:
    async def run() -> str:
        client = AsyncOpenAI(base_url=server.v1, api_key="none")
        service = OpenAIChatCompletion(ai_model_id=server.model, async_client=client)
        kernel = Kernel()
        kernel.add_plugin(Weather(), "sky")
        settings = OpenAIChatPromptExecutionSettings(
            temperature=0,
            max_tokens=80,
            response_format=Sky,
            function_choice_behavior=FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=1),
        )
        history = ChatHistory()
        history.add_user_message("Is it sunny in Rome?")
        message = await service.get_chat_message_content(history, settings, kernel=kernel)
        await client.close()
        return str(message)

    assert isinstance(Sky.model_validate_json(asyncio.run(run())), Sky)
