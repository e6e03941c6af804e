"""Writes docs/reference/configuration.md from the config classes: `make docs`."""

from __future__ import annotations

import re

from benchmarks.load.config import BenchConfig
from common.config import (
    CommonConfig,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    RankHostConfig,
    RouterConfig,
    ServeConfig,
    WorkerConfig,
)
from common.config.field import Config, Field, fields_of
from common.config.flags import default_of, group_order

INTRODUCTION = """\
# Configuration

This page lists all settings. `make docs` generates it from their definitions.

Each setting is a command-line option, an environment variable and a key of a TOML file:

| source | example | applies to |
|---|---|---|
| command line | `--max-num-seqs 8` | this process |
| environment | `DIPTYCH_DECODE_MAX_NUM_SEQS=8` | decode workers |
| | `DIPTYCH_MAX_NUM_SEQS=8` | all processes with this setting |
| TOML file (`--config FILE`) | `max_num_seqs = 8` under `[decode_worker]` | decode workers |
| | `max_num_seqs = 8` above all sections | all processes with this setting |

Options take precedence over the environment, and the environment over the file. Within the environment and the file,
the specific name takes precedence over the general one.

| process | variables | section |
|---|---|---|
| `diptych serve` | `DIPTYCH_SERVE_*` | `[serve]` |
| `diptych router` | `DIPTYCH_ROUTER_*` | `[router]` |
| `diptych prefill-worker` | `DIPTYCH_PREFILL_*` | `[prefill_worker]` |
| `diptych decode-worker` | `DIPTYCH_DECODE_*` | `[decode_worker]` |
| `diptych rank-host` | `DIPTYCH_RANK_HOST_*` | `[rank_host]` |
| `diptych bench` | `DIPTYCH_BENCH_*` | `[bench]` |

A boolean setting is `--log-json` or `--no-log-json` on the command line, and `true` or `false` elsewhere. Lists are
separated by commas. In TOML they are arrays.

An invalid value, or an unknown option, variable, key or section, stops the process at start with exit status 2 and an
error such as `invalid --port 99999: must be 0 to 65535`. On Kubernetes, set `enableServiceLinks: false`: a Service
whose name begins with `diptych` would otherwise add unknown variables.

Two variables have no option. `DIPTYCH_CACHE` is the folder of downloaded models (default `~/.cache/diptych`).
`DIPTYCH_MARCH` is the CPU type that kernels are compiled for, in the notation of compilers (default `native`). A wheel
built with `DIPTYCH_KERNELS=all` (`make wheel`) contains kernels for all CPU types and calls a compiler only if
`DIPTYCH_MARCH` is set.

`diptych serve` accepts all settings of the router and of the workers, except addresses and discovery, and passes them
to its processes. `--prefill-NAME` and `--decode-NAME` set a worker setting for one pool, such as `--decode-cores 1`.

## Tab completion

Install the extra with `pip install "diptych[completion]"`, and add one of these lines to the configuration of your
shell:

| shell | file | line |
|---|---|---|
| bash | `~/.bashrc` | `eval "$(diptych completion bash)"` |
| zsh | `~/.zshrc`, after `compinit` | `eval "$(diptych completion zsh)"` |
| fish | `~/.config/fish/config.fish` | `diptych completion fish \\| source` |
"""


CODE = re.compile(r"(?<![`\w-])(--[a-z]+(-[a-z]+)*|</?think>|DIPTYCH_\w+|OTEL_\*)(?![\w`])")
"""Names in help texts that the page shows as code."""


def _row(field: Field) -> str:
    rule = field.rule
    flag = f"`{field.flag}`, `{field.shown_flag}`" if field.default is True else f"`{field.flag}`"
    default = default_of(field)
    shown = f"`{default}`" if default else "none"
    if rule.default_note and rule.default_note != shown:
        shown = f"{shown}: {rule.default_note}" if default else rule.default_note
    text = CODE.sub(r"`\g<0>`", f"{rule.help[:1].upper()}{rule.help[1:]}. {rule.details}".strip())
    cells = (flag, text, shown, field.allowed)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _table(title: str, fields: list[Field]) -> str:
    ordered = sorted(fields, key=group_order)
    rows = "\n".join(_row(field) for field in ordered)
    return f"## {title}\n\n| option | description | default | allowed |\n|---|---|---|---|\n{rows}\n"


def _own(cls: type[Config], *bases: type[Config]) -> list[Field]:
    inherited = {field.name for base in bases for field in fields_of(base)}
    return [field for field in fields_of(cls) if field.name not in inherited]


def render() -> str:
    """Return the whole page."""
    return "\n".join(
        (
            INTRODUCTION,
            _table("All processes", _own(CommonConfig)),
            _table("One machine (`diptych serve`)", _own(ServeConfig)),
            _table("Router (`diptych router`)", _own(RouterConfig, CommonConfig)),
            _table("Prefill and decode workers", _own(WorkerConfig, CommonConfig)),
            _table("Prefill worker (`diptych prefill-worker`)", _own(PrefillWorkerConfig, WorkerConfig)),
            _table("Decode worker (`diptych decode-worker`)", _own(DecodeWorkerConfig, WorkerConfig)),
            _table("Rank host (`diptych rank-host`)", _own(RankHostConfig)),
            _table("Benchmark (`diptych bench`)", _own(BenchConfig)),
        )
    )


if __name__ == "__main__":
    print(render(), end="")
