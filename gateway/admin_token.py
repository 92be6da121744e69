"""The shared secret of the admin API: whoever changes something there, or makes it work, must show it.

Without a file in the configuration nothing is asked for. Must never be logged, shown or passed on.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

MIN_CHARS, MAX_CHARS = 16, 1_000
SAFE_METHODS = (hdrs.METH_GET, hdrs.METH_HEAD)
"""They only read, and cost little."""


class AdminTokenError(Exception):
    """The file cannot be used; the message says why."""


def read_token(path: Path | None) -> str | None:
    """The secret in the file `gateway.admin_token_file`; `None` if none is named. Raises AdminTokenError."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            token = file.read(MAX_CHARS + 2).strip().decode("ascii")
    except OSError as error:
        raise AdminTokenError(f"gateway.admin_token_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if not (MIN_CHARS <= len(token) <= MAX_CHARS and token.isprintable() and " " not in token):
        raise AdminTokenError(
            f"gateway.admin_token_file: {path} must hold one word of {MIN_CHARS} to {MAX_CHARS} letters and "
            "digits; `openssl rand -hex 32` makes one"
        )
    return token


def headers_with(token: str | None) -> dict[str, str]:
    """What shows the secret."""
    return {} if token is None else {hdrs.AUTHORIZATION: f"Bearer {token}"}


def asks_for(token: str | None) -> list[Middleware]:
    """What refuses requests without the secret, before their bodies are read."""
    if token is None:
        return []
    expected = token.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, shown = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        is_right = hmac.compare_digest(shown.strip().encode(errors="surrogateescape"), expected)
        if request.method not in SAFE_METHODS and not (is_right and scheme.lower() == "bearer"):
            raise web.HTTPUnauthorized(
                text="show what is in the gateway's gateway.admin_token_file: `authorization: Bearer …`\n",
                headers={hdrs.WWW_AUTHENTICATE: "Bearer", hdrs.CONNECTION: "close"},
            )
        return await handler(request)

    return [check]
