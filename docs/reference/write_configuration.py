"""Writes docs/reference/configuration.md from the config classes: `make docs`."""

from __future__ import annotations

import re
from itertools import groupby

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

All settings. `make docs` generates this page from their definitions.

Each setting is a command-line option, an environment variable and a key of a TOML file:

| source | example | applies to |
|---|---|---|
| option | `--max-num-seqs 8` | this process |
| environment | `DIPTYCH_DECODE_MAX_NUM_SEQS=8` | decode workers |
| | `DIPTYCH_MAX_NUM_SEQS=8` | all processes with this setting |
| file (`--config FILE`) | `max_num_seqs = 8` under `[decode_worker]` | decode workers |
| | `max_num_seqs = 8` above all sections | all processes with this setting |

Options override the environment, and the environment overrides the file. Within the environment and the file, the
specific name overrides the general one.

The sections are `[serve]`, `[router]`, `[prefill_worker]`, `[decode_worker]`, `[rank_host]` and `[bench]`. The
variables of a process begin with `DIPTYCH_SERVE_`, `DIPTYCH_ROUTER_`, `DIPTYCH_PREFILL_`, `DIPTYCH_DECODE_`,
`DIPTYCH_RANK_HOST_` or `DIPTYCH_BENCH_`.

Parentheses contain the default, then the accepted values that the description does not name. A boolean setting is on
by default if `--no-NAME` is listed, and off otherwise; in the environment and the file it is `true` or `false`. Lists
are separated by commas, and are arrays in TOML.

An invalid value, or an unknown option, variable, key or section, stops the process at start with exit status 2. On
Kubernetes, set `enableServiceLinks: false`: a Service whose name begins with `diptych` would otherwise add unknown
variables.

Two variables have no option. `DIPTYCH_CACHE` is the folder of downloaded models (default `~/.cache/diptych`).
`DIPTYCH_MARCH` is the CPU type that kernels are compiled for, in the notation of compilers (default `native`). With a
wheel that contains [kernels](../contributing/release.md#kernels-in-the-wheel), only `DIPTYCH_MARCH` makes a process
compile.

`diptych serve` accepts all settings of the router and of the workers, except addresses and discovery.
`--prefill-NAME` and `--decode-NAME` set a worker setting for one pool, such as `--decode-cores 1`.

## Tab completion

Install the extra with `pip install "diptych[completion]"`, and add a line to your shell's configuration:

- bash, in `~/.bashrc`: `eval "$(diptych completion bash)"`
- zsh, in `~/.zshrc` after `compinit`: `eval "$(diptych completion zsh)"`
- fish, in `~/.config/fish/config.fish`: `diptych completion fish | source`
"""


CODE = re.compile(r"(?<![`\w-])(--[a-z]+(-[a-z]+)*|</?think>|DIPTYCH_\w+|OTEL_\*)(?![\w`])")
"""Names in help texts that the page shows as code."""
PAGE = re.compile(r"docs/(\w+)/([\w-]+)\.md")
LONG = 20
"""Sections with more settings have a heading for each group."""
SELF_EVIDENT = ("text", "a host name or IP address", "a valid Kubernetes name", "the name of a namespace")


def _values(field: Field, text: str) -> str:
    """Return the default and, unless `text` names them, the accepted values."""
    rule = field.rule
    default, note = default_of(field), CODE.sub(r"`\g<0>`", rule.default_note)
    shown = ": ".join(filter(None, (f"`{default}`" if default else "", note if note != "none" else "")))
    allowed = field.allowed if "-" in field.bounds else field.bounds.replace(" to ", "\u2013") or field.allowed
    choices = [f"`{choice}`" for choice in rule.choices if choice not in (0, "")]
    if choices:
        allowed = "" if all(choice in text for choice in choices) else ", ".join(choices)
    if allowed in SELF_EVIDENT or rule.pattern == ".+" or (rule.pattern and "such as" in rule.help):
        allowed = ""
    return "; ".join(filter(None, (shown, allowed)))


def _item(field: Field) -> str:
    rule = field.rule
    flag = f"`{field.flag}`, `{field.shown_flag}`" if field.default is True else f"`{field.flag}`"
    text = CODE.sub(r"`\g<0>`", f"{rule.help[:1].upper()}{rule.help[1:]}. {rule.details}".strip())
    values = _values(field, text) if field.type is not bool else ""
    text = PAGE.sub(r"[\2](../\1/\2.md)", text)
    return f"- {flag}{f' ({values})' if values else ''}: {text}"


def _section(title: str, fields: list[Field], *above: type[Config]) -> str:
    """Return the section of `fields`. Those that `above` has too are only named."""
    known = {field.name: field for base in above for field in fields_of(base)}
    new = [field for field in fields if (same := known.get(field.name)) is None or same.rule.help != field.rule.help]
    new.sort(key=group_order)
    lines = [f"## {title}"]
    if len(new) > LONG:
        for group, members in groupby(new, key=lambda field: field.rule.group):
            lines += ["", f"**{group}**", "", *map(_item, members)]
    else:
        lines += ["", *map(_item, new)]
    if shared := [f"`{field.flag}`" for field in fields if field not in new]:
        lines += ["", f"As above: {', '.join(shared)}."]
    return "\n".join((*lines, ""))


def _own(cls: type[Config], *bases: type[Config]) -> list[Field]:
    inherited = {field.name for base in bases for field in fields_of(base)}
    return [field for field in fields_of(cls) if field.name not in inherited]


def render() -> str:
    """Return the whole page."""
    return "\n".join(
        (
            INTRODUCTION,
            _section("All processes", _own(CommonConfig)),
            _section("One machine (`diptych serve`)", _own(ServeConfig)),
            _section("Router (`diptych router`)", _own(RouterConfig, CommonConfig)),
            _section("Prefill and decode workers", _own(WorkerConfig, CommonConfig), RouterConfig),
            _section("Prefill worker (`diptych prefill-worker`)", _own(PrefillWorkerConfig, WorkerConfig)),
            _section("Decode worker (`diptych decode-worker`)", _own(DecodeWorkerConfig, WorkerConfig)),
            _section("Rank host (`diptych rank-host`)", _own(RankHostConfig), CommonConfig),
            _section("Benchmark (`diptych bench`)", _own(BenchConfig), CommonConfig),
        )
    )


if __name__ == "__main__":
    print(render(), end="")
