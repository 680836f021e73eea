"""Command line of the proxy process.

`python -m gyre_proxy --tokenizer DIR --record run.jsonl --engine URL`.
"""

import argparse
import json
import sys
from pathlib import Path

from gyre_proxy.errors import ProxyError
from gyre_proxy.parsers import TOOL_PARSERS
from gyre_proxy.service import serve
from gyre_proxy.settings import Settings, token_from_environment


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 after a clean end, 2 for settings that cannot work."""
    given = _parser().parse_args(arguments)
    try:
        settings = Settings(
            tokenizer=given.tokenizer,
            record=given.record,
            engines=tuple(given.engine),
            host=given.host,
            port=given.port,
            admin_token=token_from_environment(given.admin_token_env),
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
        )
        serve(settings, given.exit_with_parent)
    except ProxyError as error:
        print(f"gyre-proxy: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre-proxy", description="Record what harnesses and engines say.")
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="Hugging Face tokenizer directory")
    add("--record", type=Path, required=True, metavar="FILE", help="run log to append to (run.jsonl)")
    add("--engine", action="append", default=[], metavar="URL", help="engine to start with; repeatable")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free port")
    add("--admin-token-env", metavar="NAME", help="environment variable that holds the admin token")
    add("--strict", action="store_true", help="serve only keys issued through the admin API")
    add("--model", default="gyre", help="name shown by /v1/models")
    add("--context-length", type=int, help="tokens; default: what the tokenizer directory says")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=-1)
    add("--max-new-tokens", type=int, help="answer limit when the client names none")
    add("--tool-parser", choices=sorted(TOOL_PARSERS), default="hermes")
    add("--template-arguments", type=json.loads, default={}, metavar="JSON", help="extra template variables")
    add("--call-deadline", type=float, default=1800.0, metavar="SECONDS")
    add("--keepalive", type=float, default=10.0, metavar="SECONDS")
    add("--exit-with-parent", action="store_true", help="end when standard input ends")
    return parser


if __name__ == "__main__":
    sys.exit(main())
