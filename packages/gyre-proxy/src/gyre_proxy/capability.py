"""Owns the keys that give a harness access to one execution.

Signed, expiring, checkable without any table.
"""

import base64
import hashlib
import hmac
import re

from gyre_proxy.errors import Forbidden, Unauthorised

PREFIX = "gyre-"
_EXECUTION = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def valid_execution(name: str) -> bool:
    """Whether the name can stand in a URL path and in a file name."""
    return _EXECUTION.fullmatch(name) is not None and not name.startswith(".")


def issue(secret: bytes, execution: str, expires: float) -> str:
    """A key for this execution until `expires` (unix seconds)."""
    payload = f"{execution}|{int(expires)}"
    return PREFIX + _text(payload.encode()) + "." + _signature(secret, payload)


def verify(secret: bytes, key: str, now: float) -> str:
    """The execution a key was issued for. Raises Unauthorised for a forged or expired key."""
    body, dot, signature = key.removeprefix(PREFIX).partition(".")
    try:
        payload = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode()
    except ValueError:
        payload = ""
    execution, bar, expires = payload.rpartition("|")
    genuine = hmac.compare_digest(signature.encode(), _signature(secret, payload).encode())
    if not (key.startswith(PREFIX) and dot and bar and genuine):
        raise Unauthorised("this key was not issued by this proxy; use the key of your execution")
    if now > int(expires):
        raise Unauthorised("this key has expired; its execution is over")
    return execution


def execution_of(secret: bytes, key: str | None, path: str | None, strict: bool, now: float) -> str:
    """The execution a request belongs to: by path, else by key.

    In strict mode only an issued key counts. Otherwise any key will do, but an issued key never opens another
    execution than its own, and a request without a path is told apart by its key.
    """
    issued = verify(secret, key, now) if key and key.startswith(PREFIX) else None
    if strict and issued is None:
        raise Unauthorised("a key issued by this proxy's admin API is needed (strict mode)")
    if issued is not None and path is not None and issued != path:
        raise Forbidden(f"this key is for another execution than {path!r}")
    execution = path or issued or key or "default"
    if not valid_execution(execution):
        if path is not None:
            raise Forbidden("an execution's name has 1 to 128 letters, digits and . _ : -")
        return "key-" + hashlib.sha256(execution.encode()).hexdigest()[:16]
    return execution


def _signature(secret: bytes, payload: str) -> str:
    return _text(hmac.digest(secret, payload.encode(), "sha256")[:16])


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
