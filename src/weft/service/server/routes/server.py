"""The server itself, and the ways to search."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from .... import __version__
from ....engines import engine_names
from ....engines.capabilities import OWN
from ....search.strategies import STRATEGIES
from ...api.jobs import StrategyList, StrategyObject
from ...api.models import ServerObject
from ...interchange import EXPORTERS
from ...interchange.importers import formats as import_formats
from ..dependencies import ERRORS
from ..serializers import model_response, to_model_object
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["server"], responses=ERRORS)


@router.get("/server", response_model=ServerObject)
async def read_server(request: Request, service: ServiceDep) -> Response:
    """Say what this server is, what it can do, and what one may ask of it."""
    shelf, limits = service.models, service.config.limits
    return model_response(
        ServerObject(
            version=__version__,
            models=[to_model_object(shelf, model) for model in shelf],
            default_model=shelf.default,
            engines={name: {"is_own": name in OWN} for name in engine_names()},
            limits={name: getattr(limits, name) for name in limits.__dataclass_fields__},
            formats=formats(),
            jobs=service.n_works,
            is_public=service.config.is_public,
            token_accepted=request.scope.get("weft.token_accepted", False),
        )
    )


def formats() -> dict[str, list[str]]:
    """Return the names of the formats that looms come from and go to."""
    return {"import": import_formats(), "export": list(EXPORTERS)}


@router.get("/strategies", response_model=StrategyList)
async def list_strategies() -> Response:
    """List the ways to search, for runs."""
    rows = [
        StrategyObject(
            name=each.name,
            title=each.title,
            says=each.says,
            breadth=None if each.breadth is None else each.breadth.counts,
            n=None if each.n is None else each.n.counts,
            breadth_default=None if each.breadth is None else each.breadth.default,
            n_default=None if each.n is None else each.n.default,
            refused=list(each.refused),
        )
        for each in STRATEGIES.values()
    ]
    return model_response(StrategyList(data=rows))
