"""`vllm bench serve` without the rest of vLLM's command line, which wants the package that was made for a GPU."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
