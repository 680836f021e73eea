"""Owns the admin API that the driver of a run calls (docs/architecture.md).

Executions, engines, reroutes, status.
"""

import hmac
import time
from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

import orjson
from gyre_trajtree import Execution, RecordError

from gyre_proxy.capability import issue, valid_execution
from gyre_proxy.connections import check_origin
from gyre_proxy.engine_client import LARGEST_VERSION
from gyre_proxy.errors import BadRequest, Forbidden, NotFound, Unauthorised
from gyre_proxy.executions import KEY_LIFETIME_S
from gyre_proxy.gateway import Gateway
from gyre_proxy.nesting import DEPTH, too_deep
from gyre_proxy.router import Engine

if TYPE_CHECKING:
    from gyre_proxy.server import Application


_OPENED = ("group", "task", "dispatch_version", "harness", "prompt")
_CLOSED = ("termination", "error")


async def handle(application: "Application", scope: dict, body: bytes) -> tuple[int, dict]:
    """(status, answer) of one admin call, authorised before. Raises ProxyError."""
    gateway = application.gateway
    method, parts = scope["method"], [part for part in scope["path"].split("/") if part][1:]
    given = _object(body)
    if (method, parts) == ("GET", ["status"]):
        return 200, status(gateway)
    if (method, parts) == ("POST", ["executions"]):
        return 200, await _open(application, given, _host_url(application, scope))
    if method == "POST" and len(parts) == 3 and parts[0] == "executions" and parts[2] == "close":
        return 200, {"calls": await _close(gateway, parts[1], given)}
    if (method, parts) == ("PUT", ["engines"]):
        gateway.router.replace([_engine(entry) for entry in _list(given, "engines")])
        gateway.engines_changed.fire()
        return 200, status(gateway)
    if (method, parts) == ("POST", ["reroute"]):
        return 200, await _reroute(gateway, given)
    raise NotFound(f"no admin call {method} {scope['path']}")


def load(gateway: Gateway) -> dict:
    """Counts that anybody may see: engines that serve, open executions, calls under way."""
    return {
        "engines_admitting": sum(e.serving for e in gateway.router.engines.values()),
        "executions": len(gateway.executions),
        "calls_under_way": gateway.under_way,
    }


def status(gateway: Gateway) -> dict:
    """Engines with their load, counts of executions, calls and reroutes."""
    engines = {
        e.url: {
            "in_flight": e.in_flight,
            "admitting": e.admitting,
            "version": e.version,
            "capacity": e.capacity,
            "weights": e.cache_key,
            "asked": e.asked,
        }
        for e in gateway.router.engines.values()
    }
    return {
        "engines": engines,
        "executions": len(gateway.executions),
        "calls": gateway.calls,
        "reroutes": gateway.reroutes,
    }


def authorise(token: str | None, scope: dict) -> None:
    """Raises Forbidden or Unauthorised for a request without the admin token."""
    if token is None:
        raise Forbidden("the admin API is off; start the proxy with --admin-token-stdin or --admin-token-env")
    given = dict(scope["headers"]).get(b"authorization", b"")
    if not hmac.compare_digest(given, b"Bearer " + token.encode()):
        raise Unauthorised("the admin API needs 'Authorization: Bearer <admin token>'")


def _host_url(application: "Application", scope: dict) -> str:
    """The proxy's URL as the caller reached it: the address listened on may be none that a harness can use."""
    host = dict(scope["headers"]).get(b"host")
    return f"http://{host.decode('latin-1')}" if host else application.base_url


async def _open(application: "Application", given: Mapping, base_url: str) -> dict:
    execution, deadline = _execution(given.get("id")), given.get("deadline")
    if deadline is None:
        deadline = time.time() + KEY_LIFETIME_S
    if type(deadline) not in (int, float):
        raise BadRequest("'deadline' must be unix seconds", "deadline")
    engine = None if given.get("engine") is None else _known(application.gateway, given["engine"])
    opened = _state(execution, "opened", given, _OPENED, deadline=float(deadline))
    await application.gateway.open_execution(opened, engine, _recorded(given))
    return {
        "base_url": f"{base_url}/x/{execution}",
        "key": issue(application.secret, execution, deadline),
    }


async def _close(gateway: Gateway, execution: str, given: Mapping) -> int:
    closed = _state(_execution(execution), "closed", given, _CLOSED)
    return await gateway.close_execution(closed, _recorded(given))


def _execution(name: object) -> str:
    if not isinstance(name, str) or not valid_execution(name):
        raise BadRequest("'id' must be 1 to 128 letters, digits and . _ : -", "id")
    return name


def _state(execution: str, state: str, given: Mapping, fields: Iterable[str], **more: object) -> Execution:
    """The line of the run log that says so."""
    named = {name: given[name] for name in fields if given.get(name) is not None}
    try:
        return Execution(execution, state, time=time.time(), **named, **more)
    except RecordError as error:
        raise BadRequest(str(error)) from error


def _recorded(given: Mapping) -> bool:
    """Whether the proxy writes the line; a driver that writes these lines itself says no."""
    record = given.get("record", True)
    if not isinstance(record, bool):
        raise BadRequest("'record' must be true or false", "record")
    return record


def _engine(entry: object) -> Engine:
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise BadRequest("every engine needs a 'url'", "engines")
    try:
        check_origin(entry["url"])
    except ValueError as error:
        raise BadRequest(str(error), "engines") from error
    version, admitting = entry.get("version"), entry.get("admitting", True)
    capacity = entry.get("capacity")
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise BadRequest("'capacity' must be a positive integer or null", "engines")
    if version is not None and (type(version) is not int or not 0 <= version <= LARGEST_VERSION):
        raise BadRequest(f"'version' must be an integer from 0 to {LARGEST_VERSION}, or null", "engines")
    if not isinstance(admitting, bool):
        raise BadRequest("'admitting' must be true or false", "engines")
    return Engine(entry["url"].rstrip("/"), admitting, version, capacity)


async def _reroute(gateway: Gateway, given: Mapping) -> dict:
    source = _known(gateway, given.get("source"))
    moves, deadline_s = given.get("moves") or {}, given.get("deadline_s", 30.0)
    if not isinstance(moves, dict):
        raise BadRequest("'moves' must map executions to engine urls", "moves")
    if type(deadline_s) not in (int, float) or not 0 < deadline_s < inf:
        raise BadRequest("'deadline_s' must be a positive number", "deadline_s")
    moves = {execution: _known(gateway, url) for execution, url in moves.items()}
    moved, continued = await gateway.reroute(source, moves, float(deadline_s))
    return {"moved": moved, "continued": continued}


def _known(gateway: Gateway, url: object) -> str:
    if not isinstance(url, str) or url.rstrip("/") not in gateway.router.engines:
        raise BadRequest(f"engine {url!r} is not in the table; PUT /admin/engines first")
    return url.rstrip("/")


def _object(body: bytes) -> dict:
    try:
        value = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    if too_deep(value):
        raise BadRequest(f"the body nests deeper than {DEPTH} levels; flatten it")
    return value


def _list(given: Mapping, name: str) -> list:
    if not isinstance(given.get(name), list):
        raise BadRequest(f"{name!r} must be a list", name)
    return given[name]
