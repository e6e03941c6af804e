"""`diptych COMMAND`: runs the command's module, and imports no other command."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from common import __version__
from common.packages import PACKAGES

COMMANDS = {
    "serve": ("router.cli.serve.serve", "the whole service on this machine: model, workers and router"),
    "router": ("router", "only the HTTP front door"),
    "prefill-worker": ("prefill_worker", "only a worker that computes prompts"),
    "decode-worker": ("decode_worker", "only a worker that generates tokens"),
    "rank-host": ("common.engine.ranks.rank_host", "ranks of a worker that is spread over several hosts"),
    "top": ("router.cli.top", "show a router's load in the terminal"),
    "batch": ("router.cli.batch", "send every request of a file, and write the answers to another"),
    "bench": ("benchmarks.load.command", "load any OpenAI-compatible server and measure it"),
    "plan": ("benchmarks.plan", "find the cheapest pools and flags that meet goals for a load, by simulation"),
    "simulate": ("benchmarks.simulator", "simulate a service in virtual time: a load, goals, policies, failures"),
    "api-key": ("router.access.new_key", "draw an API key and print its entry for the router's key file"),
    "keygen": ("common.wire.keygen", "make a key pair that encrypts and authenticates what processes send"),
    "fetch": ("common.model_files.fetch", "download a built-in model into the cache"),
    "size": ("router.cli.size", "estimate how many workers a load needs"),
}

EXTRAS = {
    "bench": "bench",
    "plan": "bench",
    "simulate": "bench",
    "prefill-worker": "worker",
    "decode-worker": "worker",
    "rank-host": "worker",
}
"""What brings the packages that a command needs; those of others come with `router`, or with both for `serve`."""


def usage() -> str:
    """The text of `diptych --help`."""
    lines = [f"  {name:<16}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: diptych COMMAND [options]",
            "",
            "Serves a language model from two pools of workers: one computes prompts, one generates tokens.",
            "",
            *lines,
            "",
            "diptych COMMAND --help lists a command's options; diptych --version prints the version.",
            "The shortest way to a running service: diptych serve",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, unless the command ends the process itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("-V", "--version"):
        print(f"diptych {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"diptych: no command {command!r}; it is one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"diptych {command}", *arguments[1:]]
    try:
        runpy.run_module(COMMANDS[command][0], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        print(missing_package(command, error.name), file=sys.stderr)
        return 1
    return 0


def missing_package(command: str, name: str | None) -> str:
    """What to do where a command's packages are not installed."""
    extra = EXTRAS.get(command, "router,worker" if command == "serve" else "router")
    return (
        f"diptych {command} needs the package {name}, which is not installed here: it comes with "
        f"{sys.executable} -m pip install 'diptych[{extra}]', in a checkout with -e '.[{extra}]'"
    )
