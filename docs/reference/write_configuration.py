"""Writes docs/reference/configuration.md from the config classes: `make docs`."""

from __future__ import annotations

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
from common.config.sources import group_order

INTRODUCTION = """\
# Configuration

`make docs` writes this page from the settings' own help texts.

Every setting has one name in three spellings:

| where | spelling of `max_num_seqs` | holds for |
|---|---|---|
| command line | `--max-num-seqs 8` | this process |
| environment | `DIPTYCH_DECODE_MAX_NUM_SEQS=8` | decode workers |
| | `DIPTYCH_MAX_NUM_SEQS=8` | every process that has the setting |
| TOML file (`--config FILE`) | `max_num_seqs = 8` under `[decode_worker]` | decode workers |
| | the same above all sections | every process that has the setting |

A flag wins over the environment, the environment over the file, and within each the narrower name over the general
one. The prefixes are `DIPTYCH_ROUTER_`, `DIPTYCH_PREFILL_`, `DIPTYCH_DECODE_`, `DIPTYCH_RANK_HOST_`,
`DIPTYCH_SERVE_` and `DIPTYCH_BENCH_`; the sections `[router]`, `[prefill_worker]`, `[decode_worker]`, `[rank_host]`,
`[serve]` and `[bench]`. Switches take `true` or `false` outside the command line, where they are `--log-json` and
`--no-log-json`; lists are separated by commas, in TOML they are arrays.

A value out of range, an unknown flag, key, section or `DIPTYCH_*` variable stops the process at start with exit status
2 and one line that names the setting, the value and the allowed values. (In Kubernetes, switch `enableServiceLinks`
off: a Service whose name begins with `diptych` would otherwise inject variables of that kind.)

`DIPTYCH_CACHE` is the folder of fetched models (default `~/.cache/diptych`). `DIPTYCH_MARCH` is the kind of CPU that
kernels are compiled for, as compilers name it (default `native`, this machine's): `x86-64-v3`, for example, is an older
one. A wheel that was built with `DIPTYCH_KERNELS=all` (`make wheel`) brings them for every instruction set, and calls a
compiler only where this is set.

`diptych serve` takes every setting of the router and of the workers except those it sets itself (worker sockets and
addresses), and passes them on. `--prefill-NAME` and `--decode-NAME` set a worker's setting for one pool alone, such as
`--decode-cores 1`. By default each worker may use every core, and workers that compute at the same time share them.
"""


def _row(field: Field) -> str:
    default = field.render(field.default)
    shown = f"`{default}`" if default else ("empty" if field.type is str else "none")
    cells = (f"`{field.flag}`", field.rule.help, shown, field.allowed)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _table(title: str, fields: list[Field]) -> str:
    ordered = sorted(fields, key=group_order)
    rows = "\n".join(_row(field) for field in ordered)
    return f"## {title}\n\n| flag | what it does | default | allowed |\n|---|---|---|---|\n{rows}\n"


def _own(cls: type[Config], *bases: type[Config]) -> list[Field]:
    inherited = {field.name for base in bases for field in fields_of(base)}
    return [field for field in fields_of(cls) if field.name not in inherited]


def render() -> str:
    """The whole page."""
    return "\n".join(
        (
            INTRODUCTION,
            _table("Every process", _own(CommonConfig)),
            _table("One machine (`diptych serve`)", _own(ServeConfig)),
            _table("Router (`diptych router`)", _own(RouterConfig, CommonConfig)),
            _table("Both kinds of worker", _own(WorkerConfig, CommonConfig)),
            _table("Prefill worker (`diptych prefill-worker`)", _own(PrefillWorkerConfig, WorkerConfig)),
            _table("Decode worker (`diptych decode-worker`)", _own(DecodeWorkerConfig, WorkerConfig)),
            _table("Further host of a worker's ranks (`diptych rank-host`)", _own(RankHostConfig)),
            _table("Load generator (`diptych bench`)", _own(BenchConfig)),
        )
    )


if __name__ == "__main__":
    print(render(), end="")
