"""Endpoints that change the running server. They need an admin key; without one configured they are disabled."""

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from fledge.server.api import json_body, read_json
from fledge.server.base_service import BaseService
from fledge.server.protocol import DrafterRequest, parse


def router(service: BaseService) -> APIRouter:
    routes = APIRouter(prefix="/admin", tags=["operation"], dependencies=[Depends(service.admin_keys.check)])

    @routes.post("/drafter", **json_body(DrafterRequest))
    async def drafter(request: Request) -> Response:
        """Replace the drafter while streams continue. Needs an admin key."""
        service.check_admission()
        body = parse(DrafterRequest, await read_json(service, request))
        return JSONResponse(await service.swap_drafter(body.model))

    return routes
