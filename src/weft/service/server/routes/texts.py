"""Routes of texts and tokens; no model runs for these."""

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
from ..dependencies import CHECKS, ERRORS
from ..serializers import model_response
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["texts"], responses=ERRORS, dependencies=CHECKS)


@router.post("/tokenize", response_model=TokenizeReply)
async def tokenize(body: TokenizeText, service: ServiceDep) -> Response:
    """Tokenize a text."""
    lm = (await service.models.available(body.model)).ready()
    ids = await asyncio.to_thread(
        lm.tokenize, body.text, special=body.special, add_bos=body.add_bos
    )
    return model_response(
        TokenizeReply(token_ids=ids, tokens=[piece_of(lm, token) for token in ids])
    )


def piece_of(lm: LM, token: int) -> TokenPiece:
    """Return a token; its text is None if its bytes are not complete characters."""
    data = lm.text.token_bytes(token)
    try:
        text: str | None = data.decode()
    except UnicodeDecodeError:
        text = None
    return TokenPiece(id=token, text=text, bytes=list(data))


@router.post("/detokenize", response_model=DetokenizeReply)
async def detokenize(body: DetokenizeIds, service: ServiceDep) -> Response:
    """Return the text of token ids."""
    lm = (await service.models.available(body.model)).ready()
    return model_response(
        DetokenizeReply(text=await asyncio.to_thread(lm.detokenize, body.token_ids))
    )


@router.post("/apply_template", response_model=ApplyTemplateReply)
async def apply_template(body: ApplyTemplate, service: ServiceDep) -> Response:
    """Apply the model's chat template; return the prompt."""
    lm = (await service.models.available(body.model)).ready()
    prompt = await asyncio.to_thread(
        lm.format_chat,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=body.tools,
        template_kwargs=body.template_kwargs,
    )
    return model_response(ApplyTemplateReply(prompt=str(prompt), token_ids=list(prompt.ids)))
