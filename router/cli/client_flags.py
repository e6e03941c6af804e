"""Command lines of the commands that send requests to a router. Imports no optional package."""

from __future__ import annotations

import argparse
import os

from common.arguments import CommandParser, number
from router.cli.models.flags import complete_models

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "DIPTYCH_API_KEY"
MAX_CONCURRENCY = 10_000
"""Each concurrent request has its own connection."""
DAY_S = 86_400.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0


def add_api_key(parser: argparse._ActionsContainer) -> None:
    """Add the flag `--api-key`, with the environment variable as its default."""
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"API key to send as a bearer token (default: the environment variable {KEY_VARIABLE})",
    )


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags `--api-key` and `--ca-file`."""
    add_api_key(parser)
    parser.add_argument(
        "--ca-file",
        default="",
        metavar="FILE",
        help="PEM file with trusted certificates (default: system)",
    )


def _add_service(parser: argparse.ArgumentParser, json_help: str) -> None:
    """Add the flags of a command that shows something of a running service."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"URL of the router (default {DEFAULT_URL})")
    parser.add_argument("--json", action="store_true", help=json_help)
    add_access(parser)


def top_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych top`."""
    parser = CommandParser(
        "diptych top",
        description="Show the load of a router: throughput, latencies, pools, request classes, plan and workers. "
        "Press q or Ctrl-C to quit.",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", default=DEFAULT_URL, help=f"URL of the router (default {DEFAULT_URL})")
    place.add_argument(
        "url", nargs="?", default=argparse.SUPPRESS, metavar="URL", help=argparse.SUPPRESS
    )  # former form
    parser.add_argument("--model", default="", metavar="NAME", help="show only this model (default: all models)")
    parser.add_argument("--once", action="store_true", help="print the load once as text and exit")
    parser.add_argument("--json", action="store_true", help="print the response of /load as JSON and exit")
    parser.add_argument(
        "--interval-s",
        type=number(MIN_INTERVAL_S, MAX_INTERVAL_S),
        default=1.0,
        metavar="X",
        help="refresh interval in seconds (default 1)",
    )
    add_access(parser)
    return parser


def ps_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych ps`."""
    parser = CommandParser(
        "diptych ps", description="List the models of a running service, with their workers, memory and requests."
    )
    _add_service(parser, "print the list as JSON")
    return parser


def explain_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych explain`."""
    parser = CommandParser(
        "diptych explain",
        description="Show why a request ran on its workers, and its predicted and measured times. A router knows its "
        "running requests and those of up to an hour.",
    )
    parser.add_argument("id", metavar="REQUEST_ID", help="the x-request-id header or the id of the response")
    _add_service(parser, "print the response of /explain as JSON")
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych doctor`."""
    parser = CommandParser(
        "diptych doctor",
        description="Check this machine, the settings and a running service. Exit status 1 if something is wrong.",
    )
    parser.add_argument("--url", default="", help=f"URL of the router (default {DEFAULT_URL}, if one runs there)")
    parser.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="write a tar.gz for a bug report, without keys, prompts, and names of hosts and users",
    )
    parser.add_argument(
        "--config", default="", metavar="FILE", help="TOML file with settings to check (default: DIPTYCH_CONFIG)"
    )
    add_access(parser)
    return parser


def run_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych run`."""
    parser = CommandParser(
        "diptych run",
        description="Chat with a model in the terminal. Without a service at the URL, starts one and stops it at the "
        "end. With a prompt, or text from a pipe, prints the answer and exits.",
        epilog='In the chat: /bye ends, /clear forgets the conversation, /set NAME VALUE sets a field of requests, """ '
        "begins and ends text of several lines, Ctrl-C stops an answer. Options after -- are those of diptych serve.",
    )
    parser.usage = "%(prog)s [options] [MODEL [PROMPT]] [-- SERVE OPTIONS]"
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="as for diptych serve")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="words of the prompt")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"URL of the service (default {DEFAULT_URL})")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--no-think", action="store_true", help="ask the model not to think")
    parser.add_argument("--verbose", action="store_true", help="show tokens, times and rates after each answer")
    complete_models(parser)
    add_access(parser)
    return parser


def batch_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych batch`."""
    parser = CommandParser(
        "diptych batch",
        description=(
            "Send all requests of a file and write the answers to another. Each line of IN is a JSON object as in "
            'OpenAI\'s Batch API: {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}. Requests that fail '
            "with a temporary error are retried. Run the same command again to resume an interrupted run."
        ),
        epilog="Answers are written in the order in which they arrive.",
    )
    parser.add_argument("input", metavar="IN", help="requests, one JSON object per line")
    parser.add_argument("output", metavar="OUT", help="answers, one JSON object per line; new ones are appended")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"URL of the server (default {DEFAULT_URL})")
    parser.add_argument(
        "--concurrency",
        type=number(1, MAX_CONCURRENCY, whole=True),
        default=32,
        metavar="N",
        help="maximum number of concurrent requests (default 32)",
    )
    add_api_key(parser)
    parser.add_argument(
        "--service-tier",
        default="flex",
        metavar="NAME",
        help="service_tier of requests that set none; '' leaves it out (default flex, which selects the batch class)",
    )
    parser.add_argument(
        "--request-class",
        default="",
        metavar="NAME",
        help="request class of all requests (default: none)",
    )
    parser.add_argument(
        "--patience-s",
        type=number(1, 30 * DAY_S),
        default=DAY_S,
        metavar="X",
        help="maximum time for a request with all retries, in seconds (default 86400)",
    )
    parser.add_argument(
        "--answer-s",
        type=number(1, DAY_S),
        default=3600.0,
        metavar="X",
        help="maximum time for one attempt, in seconds (default 3600)",
    )
    return parser
