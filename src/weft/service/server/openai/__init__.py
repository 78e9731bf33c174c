"""OpenAI's API: `/v1`."""

from . import chat, completions, embeddings, models, responses

ROUTERS = (
    models.router,
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
)
