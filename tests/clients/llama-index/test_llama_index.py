"""llama-index at Weft's server: OpenAILike and OpenAILikeEmbedding."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HELLO = [ChatMessage(role="user", content="Name one animal.")]


class Animal(BaseModel):
    """An animal."""

    is_wild: bool


def describe(is_wild: bool) -> str:
    """Describe an animal."""
    return str(is_wild)


@pytest.fixture(scope="module")
def llm(server: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=40,
        temperature=0,
    )


@pytest.mark.client("llama-index-llms-openai-like", "chat")
def test_chat_returns_text(llm: OpenAILike) -> None:
    assert llm.chat(HELLO).message.content


@pytest.mark.client("llama-index-llms-openai-like", "streaming")
def test_streamed_chat_ends_with_the_text_of_one_reply(llm: OpenAILike) -> None:
    *_, last = llm.stream_chat(HELLO)
    assert last.message.content == llm.chat(HELLO).message.content


@pytest.mark.client("llama-index-llms-openai-like", "completions")
def test_complete_continues_a_text(server: Any) -> None:
    llm = OpenAILike(model=server.model, api_base=server.v1, api_key="none", max_tokens=8)
    assert llm.complete("Once upon a").text


@pytest.mark.client("llama-index-llms-openai-like", "tools")
def test_required_tool_is_called(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(describe)
    reply = llm.chat_with_tools([tool], user_msg="A wolf.", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(reply)
    assert call.tool_name == "describe"
    assert isinstance(call.tool_kwargs["is_wild"], bool)


@pytest.mark.client("llama-index-llms-openai-like", "structured output")
def test_structured_llm_returns_an_instance_of_the_class(llm: OpenAILike) -> None:
    assert isinstance(llm.as_structured_llm(Animal).complete("A wolf.").raw, Animal)


@pytest.mark.client("llama-index-core", "query engine")
def test_summary_index_answers_a_question(llm: OpenAILike) -> None:
    index = SummaryIndex.from_documents([Document(text="The fox lives near the river.")])
    assert str(index.as_query_engine(llm=llm).query("Where does the fox live?"))


@pytest.mark.client("llama-index-embeddings-openai-like", "embeddings")
def test_similar_texts_get_vectors_of_one_length(server: Any) -> None:
    embedding = OpenAILikeEmbedding(model_name=server.model, api_base=server.v1, api_key="none")
    vectors = embedding.get_text_embedding_batch(["a fox", "a river"])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(vectors[1])
