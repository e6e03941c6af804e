"""`diptych COMMAND`: run the module of the command. No other command is imported."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from common import __version__
from common.arguments import suggestion
from common.packages import PACKAGES, install_command

PROG = "diptych"
CLOSED_PIPE = 128 + 13
"""Exit status of a command whose output is no longer read, as after SIGPIPE."""


@dataclass(frozen=True)
class Command:
    """A command. `parser` is "module:name" of a function that builds its parser, or of its `Config` class.

    `extra` is the optional dependency group that the command needs.
    """

    group: str
    about: str
    module: str
    parser: str
    extra: str = "router"


COMMANDS = {
    "serve": Command(
        "Serve",
        "serve a model on this machine: router and workers",
        "router.cli.serve.serve",
        "router.cli.serve.processes:build_parser",
        "router,worker",
    ),
    "router": Command("Serve", "run only the router, the HTTP server", "router", "common.config:RouterConfig"),
    "prefill-worker": Command(
        "Serve",
        "run only a worker that computes prompts",
        "prefill_worker",
        "common.config:PrefillWorkerConfig",
        "worker",
    ),
    "decode-worker": Command(
        "Serve",
        "run only a worker that generates tokens",
        "decode_worker",
        "common.config:DecodeWorkerConfig",
        "worker",
    ),
    "rank-host": Command(
        "Serve",
        "run the processes of a worker on an additional host",
        "common.engine.vllm.rank_host",
        "common.config:RankHostConfig",
        "worker",
    ),
    "pull": Command(
        "Models",
        "download a model into the cache",
        "common.model_files.pull",
        "common.model_files.pull:build_parser",
    ),
    "ls": Command(
        "Models", "list the models on this machine", "router.cli.models.ls", "router.cli.models.ls:build_parser"
    ),
    "show": Command(
        "Models",
        "describe a model on this machine",
        "router.cli.models.show",
        "router.cli.models.show:build_parser",
    ),
    "rm": Command(
        "Models", "delete models from this machine", "router.cli.models.rm", "router.cli.models.rm:build_parser"
    ),
    "run": Command(
        "Use",
        "chat with a model in the terminal",
        "router.cli.run",
        "router.cli.client_flags:run_parser",
        "router,worker",
    ),
    "ps": Command("Use", "list the models of a running service", "router.cli.ps", "router.cli.client_flags:ps_parser"),
    "top": Command(
        "Use",
        "show the load of a router in the terminal",
        "router.cli.top",
        "router.cli.client_flags:top_parser",
    ),
    "explain": Command(
        "Use",
        "show why a request took its time",
        "router.cli.explain",
        "router.cli.client_flags:explain_parser",
    ),
    "batch": Command(
        "Use",
        "send all requests of a file and write the answers",
        "router.cli.batch",
        "router.cli.client_flags:batch_parser",
    ),
    "bench": Command(
        "Plan and measure",
        "benchmark an OpenAI-compatible server",
        "benchmarks.load.command",
        "benchmarks.load.config:BenchConfig",
        "bench",
    ),
    "plan": Command(
        "Plan and measure",
        "find the cheapest pools that meet latency goals, by simulation",
        "benchmarks.plan",
        "benchmarks.plan.options:build_parser",
        "bench",
    ),
    "tune": Command(
        "Plan and measure",
        "find the settings that meet latency goals best on this machine",
        "benchmarks.tune",
        "benchmarks.tune.options:build_parser",
        "bench",
    ),
    "simulate": Command(
        "Plan and measure",
        "simulate a service in virtual time",
        "benchmarks.simulator",
        "benchmarks.simulator.options:build_parser",
        "bench",
    ),
    "size": Command(
        "Plan and measure",
        "estimate the number of workers for a load",
        "router.cli.size",
        "router.cli.size:build_parser",
    ),
    "doctor": Command(
        "Set up",
        "check this machine and a service",
        "router.cli.doctor",
        "router.cli.client_flags:doctor_parser",
    ),
    "api-key": Command(
        "Set up",
        "create an API key and its entry for the key file",
        "router.access.new_key",
        "router.access.new_key:build_parser",
    ),
    "keygen": Command(
        "Set up",
        "create a key pair for encrypted connections",
        "common.wire.keygen",
        "common.wire.keygen:build_parser",
    ),
    "completion": Command(
        "Set up",
        "print the shell code for tab completion",
        "router.cli.completion",
        "router.cli.completion:build_parser",
        "completion",
    ),
}

ALIASES = {"fetch": "pull"}
"""Former names of commands."""


def usage() -> str:
    """Return the text of `diptych --help`."""
    lines = [
        f"usage: {PROG} COMMAND [options]",
        "",
        "Serve large language models with separate prefill and decode workers behind an OpenAI-compatible API.",
    ]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<16}{command.about}")
    lines += [
        "",
        "Examples:",
        "  diptych serve                    # serve the built-in SmolLM2-135M on http://127.0.0.1:8000",
        "  diptych serve Qwen/Qwen3-8B      # serve a model from Hugging Face",
        "",
        "diptych help COMMAND shows the options of a command; diptych --version shows the version.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status, unless the command ends the process itself."""
    if "_ARGCOMPLETE" in os.environ:  # set by the shell code of `diptych completion`
        from router.cli.completion import complete

        complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    command = arguments[0] if arguments else "--help"
    command = ALIASES.get(command, command)
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("-V", "--version"):
        print(f"{PROG} {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"{PROG}: {unknown_command(command)}", file=sys.stderr)
        return 2
    sys.argv = [f"{PROG} {command}", *arguments[1:]]
    own = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]  # then vLLM's
    try:
        for flag in ("-h", "--help", "--help-all"):
            if flag in own:  # answered without the optional packages of the command
                parser_of(command).parse_args([flag])
        try:
            runpy.run_module(COMMANDS[command].module, run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        print(missing_package(command, str(error.name).partition(".")[0]), file=sys.stderr)
        return 1
    except BrokenPipeError:  # such as `diptych ls | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        return CLOSED_PIPE
    return 0


def parser_of(command: str) -> argparse.ArgumentParser:
    """Build the parser of a command."""
    builder: Any = resolve_name(COMMANDS[command].parser)
    if isinstance(builder, type):
        from common.config import command_parser

        return command_parser(builder, f"{PROG} {command}")
    parser: argparse.ArgumentParser = builder()
    return parser


def unknown_command(name: str) -> str:
    """Describe an unknown command, with the closest one or all of them."""
    if name.startswith("-"):
        return f"unknown option {name}; options follow the command, as in {PROG} serve {name}"
    return f"unknown command {name}{suggestion(name, COMMANDS)}; the commands are {', '.join(COMMANDS)}"


def missing_package(command: str, name: str) -> str:
    """Describe how to install the packages that a command needs."""
    extra = COMMANDS[command].extra
    return f"{PROG} {command}: the package {name} is not installed; install it with {install_command(extra)}"
