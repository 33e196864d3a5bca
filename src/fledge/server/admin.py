"""What changes the server while it runs: for those with an admin key, and off without one."""

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from fledge.errors import SwapRefusedError
from fledge.server.api import json_body, read_json
from fledge.server.protocol import DrafterRequest, parse
from fledge.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/admin", tags=["operation"], dependencies=[Depends(service.admin_keys.check)])

    @routes.post("/drafter", **json_body(DrafterRequest))
    async def drafter(request: Request) -> Response:
        """Draft with another drafter from now on; streams go on. Needs an admin key."""
        service.admit()
        asked = parse(DrafterRequest, await read_json(service, request))
        return JSONResponse(await service.swap_drafter(asked.model))

    return routes


def cannot_swap(engine: str) -> SwapRefusedError:
    """What to raise where another engine serves, such as a version of vLLM that takes no new draft weights."""
    return SwapRefusedError(f"{engine} cannot exchange its drafter while it runs; start the server with the other one")
