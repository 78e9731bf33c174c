"""Texts and tokens: no model runs for these."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from ....lm.lm import LM
from ...api.models import (
    ApplyTemplate,
    ApplyTemplateReply,
    DetokenizeIds,
    DetokenizeReply,
    TokenizeReply,
    TokenizeText,
    TokenPiece,
)
from ..dependencies import ERRORS
from ..serializers import model_response
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["texts"], responses=ERRORS)


@router.post("/tokenize", response_model=TokenizeReply)
async def tokenize(asked: TokenizeText, service: ServiceDep) -> Response:
    """Return a text's tokens."""
    lm = (await service.models.available(asked.model)).ready()
    ids = await asyncio.to_thread(
        lm.tokenize, asked.text, special=asked.special, add_bos=asked.add_bos
    )
    return model_response(
        TokenizeReply(token_ids=ids, tokens=[piece_of(lm, token) for token in ids])
    )


def piece_of(lm: LM, token: int) -> TokenPiece:
    """Return a token: without a text where its bytes are no whole characters."""
    data = lm.text.token_bytes(token)
    try:
        text: str | None = data.decode()
    except UnicodeDecodeError:
        text = None
    return TokenPiece(id=token, text=text, bytes=list(data))


@router.post("/detokenize", response_model=DetokenizeReply)
async def detokenize(asked: DetokenizeIds, service: ServiceDep) -> Response:
    """Return the text of tokens."""
    lm = (await service.models.available(asked.model)).ready()
    return model_response(
        DetokenizeReply(text=await asyncio.to_thread(lm.detokenize, asked.token_ids))
    )


@router.post("/apply_template", response_model=ApplyTemplateReply)
async def apply_template(asked: ApplyTemplate, service: ServiceDep) -> Response:
    """Return the prompt of a chat by the model's template."""
    lm = (await service.models.available(asked.model)).ready()
    prompt = await asyncio.to_thread(
        lm.format_chat,
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        tools=asked.tools,
        template_kwargs=asked.template_kwargs,
    )
    return model_response(ApplyTemplateReply(prompt=str(prompt), token_ids=list(prompt.ids)))
