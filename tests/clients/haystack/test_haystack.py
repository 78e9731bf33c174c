"""Haystack at Weft's server: its OpenAI generators and embedders."""

from __future__ import annotations

from typing import Any

import pytest
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel

KEY = Secret.from_token("none")
HELLO = [ChatMessage.from_user("Name one animal.")]


class Animal(BaseModel):
    is_wild: bool


def generator(server: Any, **options: Any) -> OpenAIChatGenerator:
    kwargs = {"max_tokens": 40, "temperature": 0, **options.pop("generation_kwargs", {})}
    return OpenAIChatGenerator(
        api_key=KEY,
        model=server.model,
        api_base_url=server.v1,
        generation_kwargs=kwargs,
        **options,
    )


@pytest.mark.client("haystack-ai", "chat")
def test_chat_generator_returns_text(server: Any) -> None:
    (reply,) = generator(server).run(HELLO)["replies"]
    assert reply.text


@pytest.mark.client("haystack-ai", "streaming")
def test_streamed_chunks_join_to_the_reply(server: Any) -> None:
    chunks: list[StreamingChunk] = []
    (reply,) = generator(server, streaming_callback=chunks.append).run(HELLO)["replies"]
    assert "".join(chunk.content for chunk in chunks) == reply.text


@pytest.mark.client("haystack-ai", "tools")
def test_required_tool_is_called(server: Any) -> None:
    tool = Tool(
        name="describe",
        description="Describe an animal.",
        parameters=Animal.model_json_schema(),
        function=lambda is_wild: str(is_wild),
    )
    component = generator(server, tools=[tool], generation_kwargs={"tool_choice": "required"})
    (reply,) = component.run(HELLO)["replies"]
    (call,) = reply.tool_calls
    assert call.tool_name == "describe"
    assert isinstance(call.arguments["is_wild"], bool)


@pytest.mark.client("haystack-ai", "structured output")
def test_response_format_of_a_class_is_honoured(server: Any) -> None:
    component = generator(server, generation_kwargs={"response_format": Animal})
    (reply,) = component.run(HELLO)["replies"]
    assert isinstance(Animal.model_validate_json(reply.text), Animal)


@pytest.mark.client("haystack-ai", "pipelines")
def test_pipeline_fills_a_prompt_and_generates(server: Any) -> None:
    pipeline = Pipeline()
    template = [ChatMessage.from_user("Where does the {{ animal }} live?")]
    pipeline.add_component("prompt", ChatPromptBuilder(template=template))
    pipeline.add_component("llm", generator(server))
    pipeline.connect("prompt", "llm")
    result = pipeline.run({"prompt": {"animal": "fox"}})
    assert result["llm"]["replies"][0].text


@pytest.mark.client("haystack-ai", "embeddings")
def test_embedders_of_texts_and_documents_agree_on_the_length(server: Any) -> None:
    options = {"api_key": KEY, "model": server.model, "api_base_url": server.v1}
    vector = OpenAITextEmbedder(**options).run("a fox")["embedding"]
    documents = [Document(content="a river"), Document(content="a fox")]
    embedded = OpenAIDocumentEmbedder(**options).run(documents)["documents"]
    assert [len(document.embedding) for document in embedded] == [len(vector)] * 2
