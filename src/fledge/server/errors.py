"""Errors in OpenAI's format."""

from typing import Any, NoReturn

from fledge.errors import ConfigError, ContextLengthError, FledgeError, PromptError, SwapRefusedError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class RequestError(FledgeError):
    """An error response. `param`: the invalid field; `code`: for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds, for the header Retry-After

    @classmethod
    def of(cls, error: FledgeError) -> "RequestError":
        """Return the error response for a request that the engine refuses: 400 unless it says otherwise."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, SwapRefusedError):
            return cls(str(error), status=409, param="model", code="drafter_refused")
        if isinstance(error, ContextLengthError):
            return cls(str(error), code="context_length_exceeded")
        param = error.param if isinstance(error, ConfigError) else None
        return cls(str(error), param="prompt" if isinstance(error, PromptError) else param)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def shutting_down(*, retry_after: int | None = None) -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=retry_after)


def queue_full(active: int) -> RequestError:
    message = f"{active} requests are running or waiting, which is all that this server takes; try again later"
    return RequestError(message, status=429, code="queue_full", retry_after=1)


def timed_out(seconds: float) -> RequestError:
    return RequestError(f"the request took longer than {seconds:g} s", status=408, code="timeout")


def refuse(field: str, message: str, **options: Any) -> NoReturn:
    """Raise RequestError for a field. `options`: as in RequestError; `param` is `field` by default."""
    raise RequestError(f"{field}: {message}", **{"param": field, **options})
