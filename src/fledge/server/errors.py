"""What a client did wrong, or what went wrong here, in OpenAI's error format."""

from typing import Any

from fledge.errors import ConfigError, ContextLengthError, FledgeError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class RequestError(FledgeError):
    """A request that gets an error answer. `param` names the field at fault, `code` is for programs."""

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
        self.retry_after = retry_after  # seconds; the header of that name

    @classmethod
    def of(cls, error: FledgeError) -> "RequestError":
        """Return the answer to a request that is wrong in the eyes of the engine: 400."""
        if isinstance(error, RequestError):
            return error
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return cls(str(error), param=error.param if isinstance(error, ConfigError) else None, code=code)

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return error_body(self.status, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object for a status."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
