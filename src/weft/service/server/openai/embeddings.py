"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, field_validator

from ..dependencies import ERRORS
from ..events import run_until_disconnect
from ..limits import check_limit
from ..service import Service, ServiceDep
from .field_errors import check_field, translate_overflow, unsupported
from .protocol import EmbeddingList, EmbeddingObject, EmbeddingUsage, ok, to_response
from .request_fields import ProtocolRequest, TokenId, check_one_kind, check_token_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ....lm.lm import LM

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)
Json = dict[str, Any]
Texts = Sequence[str | Sequence[int]]

_BATCH = 16  # texts per batch; other calls continue between batches


class EmbeddingRequest(ProtocolRequest):
    """The request of an embedding: one or more texts, or lists of token ids."""

    model: str | None = None
    input: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    ) = Field(description="A text, texts, token ids, or lists of them.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description='"base64": little-endian float32.'
    )
    dimensions: int | None = Field(None, ge=1, description="Only the model's own size is accepted.")
    user: Any = Field(None, description="Accepted; changes nothing.")

    _one_kind = field_validator("input", mode="before")(check_one_kind)

    @property
    def texts(self) -> Texts:
        """The texts or token ids, one per vector."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [given]
        return given


@router.post("/embeddings", response_model=None, responses=ok(EmbeddingList))
async def embed(body: EmbeddingRequest, request: Request, service: ServiceDep) -> Response:
    """Return a normalized vector for each text."""
    texts = body.texts
    _check_limits(texts, service)
    await service.models.available(body.model)
    with service.work("embedding", body.model) as lm:
        n_embd = lm.info.n_embd
        if body.dimensions not in (None, n_embd) and lm.info.capabilities.embed:
            raise unsupported(
                "dimensions", f"is {body.dimensions}; this model's vectors have {n_embd}"
            )
        for text in texts:
            if not isinstance(text, str):
                check_token_ids(lm, "input", text)
        with translate_overflow("input"):
            vectors = await run_until_disconnect(request, _embed_in_batches(lm, texts))
        n_tokens = await asyncio.to_thread(lambda: sum(_n_tokens(lm, text) for text in texts))
        name = service.models.get(body.model).name
    data = [
        EmbeddingObject(
            object="embedding", index=index, embedding=_encoded(vector, body.encoding_format)
        )
        for index, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
    return to_response(EmbeddingList(object="list", data=data, model=name, usage=usage))


def _check_limits(texts: Texts, service: Service) -> None:
    """Raise RequestError for more texts than the server allows."""
    service.check_accepting()
    check_limit("input", len(texts), max(service.config.limits.texts, 2048))


async def _embed_in_batches(lm: LM, texts: Texts) -> list[NDArray[np.float32]]:
    """Return the normalised vector of each text, computed in batches."""
    vectors: list[NDArray[np.float32]] = []
    for at in range(0, len(texts), _BATCH):
        batch = texts[at : at + _BATCH]
        vectors.extend(
            await asyncio.to_thread(check_field, "input", lambda batch=batch: lm.embed(batch))
        )
    return vectors


def _n_tokens(lm: LM, text: str | Sequence[int]) -> int:
    """Return the number of tokens of a text."""
    return len(lm.tokenize(text) if isinstance(text, str) else text)


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    """Return a vector as a list of numbers, or as base64 if `form` is "base64"."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector.tolist()]
