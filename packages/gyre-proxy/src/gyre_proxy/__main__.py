"""Owns the command line of the proxy: `python -m gyre_proxy`, and `gyre proxy serve`, which passes its arguments on.

python -m gyre_proxy --tokenizer DIR --record run.jsonl --engine URL
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gyre_proxy import logs
from gyre_proxy.errors import ProxyError, SettingsError
from gyre_proxy.parsers import TOOL_PARSERS
from gyre_proxy.service import serve
from gyre_proxy.settings import FLUSHES, IMAGES, Settings, token_from_environment, token_from_input

DESCRIPTION = "Serve Messages, Chat Completions and Responses in front of engines, recording exact tokens."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a clean end, 2 for arguments or settings that cannot work."""
    try:
        run_command(sys.argv[1:] if arguments is None else arguments, "gyre-proxy")
    except ProxyError as error:
        print(f"gyre-proxy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before it served
        return 130
    return 0


def run_command(arguments: Sequence[str], program: str) -> None:
    """Serve as the arguments say; `program` is the name that --help shows. Raises SettingsError."""
    given = _parser(program).parse_args(arguments)
    settings = Settings(
        tokenizer=given.tokenizer,
        record=given.record,
        engines=tuple(given.engine),
        host=given.host,
        port=given.port,
        admin_token=token_from_input()
        if given.admin_token_stdin
        else token_from_environment(given.admin_token_env),
        strict=given.strict,
        model=given.model,
        context_length=given.context_length,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        max_new_tokens=given.max_new_tokens,
        tool_parser=given.tool_parser,
        template_arguments=given.template_arguments,
        call_deadline_s=given.call_deadline,
        keepalive_s=given.keepalive,
        flush=given.flush,
        engine_capacity=given.engine_capacity,
        engine_wait_s=given.engine_wait,
        silence_s=given.silence,
        max_calls=given.max_calls,
        max_executions=given.max_executions,
        body_timeout_s=given.body_timeout,
        grace_s=given.grace,
        images=given.images,
    )
    logs.configure(given.log_level)
    serve(settings, given.exit_with_parent)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as every other one."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see --help")


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says what holds when an option is not given, where that is a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = isinstance(action.default, str | int | float) and type(action.default) is not bool
        return (
            super()._get_help_string(action) if said and action.default != argparse.SUPPRESS else action.help
        )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=DESCRIPTION, allow_abbrev=False, formatter_class=_Defaults)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="Hugging Face tokenizer directory")
    add("--record", type=Path, required=True, metavar="FILE", help="run log to append to (run.jsonl)")
    add("--engine", action="append", default=[], metavar="URL", help="engine to start with; repeatable")
    add("--host", default="127.0.0.1", help="address to listen on; one that others can reach needs --strict")
    add("--port", type=int, default=0, help="0 takes a free port")
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--admin-token-stdin", action="store_true", help="the first line of standard input is the admin token"
    )
    token.add_argument(
        "--admin-token-env",
        metavar="NAME",
        help="environment variable with the admin token; processes of the same user can read it",
    )
    add("--strict", action="store_true", help="serve only keys issued through the admin API")
    add("--model", default="gyre", help="name shown by /v1/models")
    add("--context-length", type=int, metavar="TOKENS", help="default: what the tokenizer directory says")
    add("--temperature", type=float, default=1.0, help="of every call; what clients ask is recorded only")
    add("--top-p", type=float, default=1.0, help="nucleus of every call")
    add("--top-k", type=int, default=-1, help="-1 is no limit")
    add("--max-new-tokens", type=int, metavar="TOKENS", help="answer limit when the client names none")
    add(
        "--tool-parser",
        choices=["auto", *sorted(TOOL_PARSERS)],
        default="auto",
        help="how tool calls are read",
    )
    add(
        "--template-arguments", type=_json_object, default={}, metavar="JSON", help="extra template variables"
    )
    add("--call-deadline", type=float, default=1800.0, metavar="SECONDS", help="longest time of a call")
    add("--keepalive", type=float, default=10.0, metavar="SECONDS", help="silence before a sign of life")
    add(
        "--flush",
        choices=FLUSHES,
        default="process",
        help="what answered calls survive: death or loss of power",
    )
    add("--engine-capacity", type=int, metavar="CALLS", help="calls an engine may hold; default: no limit")
    add("--engine-wait", type=float, default=300.0, metavar="SECONDS", help="longest wait for an engine")
    add("--silence", type=float, default=15.0, metavar="SECONDS", help="silence before an engine is pinged")
    add("--max-calls", type=int, default=4096, metavar="CALLS", help="under way; more get a retryable error")
    add("--max-executions", type=int, default=100_000, metavar="N", help="open at a time")
    add("--body-timeout", type=float, default=60.0, metavar="SECONDS", help="for a request to arrive whole")
    add(
        "--grace", type=float, default=0.0, metavar="SECONDS", help="for calls under way when the proxy stops"
    )
    add("--images", choices=IMAGES, default="text", help="a line of text in the place of each, or a 400")
    add("--log-level", choices=logs.LEVELS, default="warning", help="JSON lines on standard error")
    add("--exit-with-parent", action="store_true", help="end when standard input ends")
    return parser


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object such as {"enable_thinking": false}')
    return value


if __name__ == "__main__":
    sys.exit(main())
