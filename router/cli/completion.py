"""`diptych completion SHELL`: tab completion of commands and options, by argcomplete."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from common.arguments import CommandParser
from router.cli.main import COMMANDS, PROG, parser_of

SHELLS = ("bash", "zsh", "fish")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych completion`."""
    lines = {
        "bash": 'eval "$(diptych completion bash)"    # in ~/.bashrc',
        "zsh": 'eval "$(diptych completion zsh)"     # in ~/.zshrc, after compinit',
        "fish": "diptych completion fish | source    # in ~/.config/fish/config.fish",
    }
    parser = CommandParser(
        f"{PROG} completion",
        description="Print the shell code for tab completion of diptych.",
        epilog="\n".join(("Usage:", *(f"  {line}" for line in lines.values()))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


def complete() -> None:
    """Answer the request of a shell for completions and exit. Only the command on its line is imported."""
    import argcomplete

    parser = CommandParser(PROG)
    words = os.environ.get("COMP_LINE", "").split()
    current = words[1] if len(words) > 1 else ""

    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, command in COMMANDS.items():
        parents = [parser_of(name)] if name == current else []
        commands.add_parser(name, help=command.about, parents=parents, add_help=False)
    commands.add_parser("help", help="show the options of a command").add_argument("command", choices=list(COMMANDS))
    argcomplete.autocomplete(parser, always_complete_options="long")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the shell code. Returns exit status 0."""
    shell = build_parser().parse_args(argv).shell
    import argcomplete  # optional

    print(argcomplete.shell_integration.shellcode([PROG], shell=shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
