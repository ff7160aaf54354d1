"""How the hub says in a reply that it has not handled a request: headers, as NATS's own services use them, so that the
client of every service can read them whatever its replies look like."""

FAILED, SLOW_DOWN, FORBIDDEN, INVALID = 500, 429, 403, 400
"""Codes, with the meanings that they have in HTTP. `FAILED`: a fault of the hub. `SLOW_DOWN`: the peer asks for more
than its budget; ask again later. `FORBIDDEN`: it is not for this peer. `INVALID`: the hub cannot read the request."""
_CODE, _TEXT = "Nats-Service-Error-Code", "Nats-Service-Error"


class HubFailedError(ConnectionError):
    """The hub failed while it handled a request: nothing is wrong with this machine, and a retry may succeed."""


def error_headers(code: int, text: str) -> dict[str, str]:
    return {_CODE: str(code), _TEXT: text}


def error_code(headers: dict[str, str] | None) -> int | None:
    """The code of a reply with `error_headers`; None: the request was handled."""
    code = (headers or {}).get(_CODE, "")
    return int(code) if code.isascii() and code.isdigit() and len(code) == 3 else None
