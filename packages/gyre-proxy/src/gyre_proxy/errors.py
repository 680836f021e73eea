"""Owns the package's errors. Each carries the HTTP status a client gets and one line that says what to do."""


class ProxyError(Exception):
    """Base of every error of this package."""

    status = 500


class SettingsError(ProxyError):
    """The proxy cannot start as it was configured."""


class TokenizerError(SettingsError):
    """The tokenizer directory cannot serve chats."""


class BadRequest(ProxyError):
    """The request asks for something this proxy does not do, or is malformed."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextOverflow(BadRequest):
    """The prompt leaves no room in the model's context."""

    def __init__(self, tokens: int, limit: int, counted: bool = True) -> None:
        note = "" if counted else " (at least; a text that cannot fit is not counted out)"
        super().__init__(f"prompt is too long: {tokens} tokens > {limit} maximum{note}")
        self.tokens = tokens
        self.limit = limit


class Unauthorised(ProxyError):
    """No usable key."""

    status = 401


class Forbidden(ProxyError):
    """A valid key for something else."""

    status = 403


class NotFound(ProxyError):
    """No such path."""

    status = 404


class ExecutionClosed(ProxyError):
    """The execution has ended; its calls are not served any more."""

    status = 410


class ClientLeft(ProxyError):
    """Nobody is left to answer."""

    status = 499


class BodyTooLarge(ProxyError):
    """The request body exceeds what the proxy reads into memory."""

    status = 413


class EngineUnavailable(ProxyError):
    """No engine finishes the call: its deadline or patience is over, too many were lost, or the proxy stops.

    The message names what was waited for.
    """

    status = 503


class Busy(ProxyError):
    """More is under way than the proxy takes on; the message names the limit."""

    status = 503


class BodyTimeout(ProxyError):
    """The request body did not arrive in time."""

    status = 408


class RecordingFailed(ProxyError):
    """The call could not be made durable, so its answer is withheld."""

    status = 503
