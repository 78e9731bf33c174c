"""Routes of the server itself, and of the search strategies."""

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
from ..dependencies import CHECKS, ERRORS
from ..serializers import model_response, to_model_object
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["server"], responses=ERRORS, dependencies=CHECKS)


@router.get("/server", response_model=ServerObject)
async def read_server(request: Request, service: ServiceDep) -> Response:
    """Return the server's version, models, limits and formats."""
    registry, limits = service.models, service.config.limits
    return model_response(
        ServerObject(
            version=__version__,
            models=[to_model_object(registry, model) for model in registry],
            default_model=registry.default,
            engines={name: {"is_own": name in OWN} for name in engine_names()},
            limits={name: getattr(limits, name) for name in limits.__dataclass_fields__},
            formats=formats(),
            jobs=service.n_works,
            is_public=service.config.is_public,
            token_accepted=request.scope.get("weft.token_accepted", False),
        )
    )


def formats() -> dict[str, list[str]]:
    """Return the names of the import and export formats."""
    return {"import": import_formats(), "export": list(EXPORTERS)}


@router.get("/strategies", response_model=StrategyList)
async def list_strategies() -> Response:
    """List the search strategies."""
    rows = [
        StrategyObject(
            name=strategy.name,
            title=strategy.title,
            says=strategy.summary,
            breadth=None if strategy.breadth is None else strategy.breadth.counts,
            n=None if strategy.n is None else strategy.n.counts,
            breadth_default=None if strategy.breadth is None else strategy.breadth.default,
            n_default=None if strategy.n is None else strategy.n.default,
            refused=list(strategy.refused),
        )
        for strategy in STRATEGIES.values()
    ]
    return model_response(StrategyList(data=rows))
