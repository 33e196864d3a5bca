"""What changes the server while it runs: for those with an admin key, and off without one."""

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from fledge.server.api import json_body, read_json
from fledge.server.protocol import DrafterRequest, parse
from fledge.server.servable import Servable


def router(service: Servable) -> APIRouter:
    routes = APIRouter(prefix="/admin", tags=["operation"], dependencies=[Depends(service.admin_keys.check)])

    @routes.post("/drafter", **json_body(DrafterRequest))
    async def drafter(request: Request) -> Response:
        """Draft with another drafter from now on; streams go on. Needs an admin key."""
        service.admit()
        asked = parse(DrafterRequest, await read_json(service, request))
        return JSONResponse(await service.swap.run(asked.model))

    return routes
