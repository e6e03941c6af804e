"""`diptych units FORM`: writes a folder for each machine of a small service, with all that its processes need.

diptych units systemd --model smollm2-135m --router 10.0.0.6 --prefill 10.0.0.7 --decode 10.0.0.8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import __version__
from common.errors import ConfigError
from common.wire.curve_keys import KeyPair, write_key_pair
from router.units import compose, systemd
from router.units.lab import ACCELERATORS, Lab, Unit

PROGRAM = "diptych units"
FORMS = ("systemd", "compose")
NEXT = {
    "systemd": "copy {folder} to {host}; there, as root: sh install.sh",
    "compose": "copy {folder} to {host}; there: chown 10001 curve.key && docker compose up -d",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Writes what a service of a few machines needs without Kubernetes: for each machine a folder with "
        "its systemd units or compose file, the configuration file and the key that all of them share.",
        epilog="Further settings belong into the diptych.toml of each folder (docs/configuration.md).",
        allow_abbrev=False,
    )
    parser.add_argument("form", choices=FORMS, help="what keeps the processes running")
    parser.add_argument("--model", required=True, help="built-in name, Hugging Face id, or a path on the machines")
    parser.add_argument("--router", required=True, metavar="HOST", help="machine of the router")
    place: dict[str, Any] = {"action": "append", "default": [], "metavar": "HOST[*N]"}
    parser.add_argument("--prefill", help="machine of a prefill worker, or of N of them; may be repeated", **place)
    parser.add_argument("--decode", help="machine of a decode worker, or of N of them; may be repeated", **place)
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="cpu", help="what workers compute on")
    parser.add_argument("--router-port", type=int, default=8000, metavar="PORT", help="port of the router")
    parser.add_argument(
        "--worker-port", type=int, default=7000, metavar="PORT", help="first of ten ports of a machine's first worker"
    )
    parser.add_argument("--program", default="/opt/diptych/bin/diptych", help="systemd: where Diptych is installed")
    parser.add_argument("--registry", default="", help="compose: host and path of the images, such as ghcr.io/acme")
    parser.add_argument("--version-of-images", default=__version__, metavar="TAG", help="compose: their version")
    parser.add_argument("--out", type=Path, default=Path("diptych-units"), metavar="FOLDER", help="where to write")
    return parser


def folders(options: argparse.Namespace) -> Mapping[str, Mapping[str, str]]:
    """Machine -> file name -> content. Raises ConfigError."""
    lab = Lab(
        options.model,
        options.router,
        tuple(options.prefill),
        tuple(options.decode),
        options.accelerator,
        options.router_port,
        options.worker_port,
    )
    if options.form == "compose" and "/" not in options.registry and "." not in options.registry:
        raise ConfigError("registry", options.registry, "where your images were pushed to, such as ghcr.io/acme")

    def of_machine(units: Sequence[Unit]) -> Mapping[str, str]:
        if options.form == "systemd":
            return systemd.files(units, options.program, lab.accelerator)
        return compose.files(units, options.registry.rstrip("/"), options.version_of_images, lab.accelerator)

    units = lab.units()
    return {
        host: {"diptych.toml": lab.settings(), **of_machine([unit for unit in units if unit.host == host])}
        for host in lab.hosts
    }


def write(made: Mapping[str, Mapping[str, str]], out: Path) -> None:
    """Write the folders, each with the same new key. Raises FileExistsError when `out` is there already."""
    out.mkdir(parents=True)
    pair = KeyPair.generate()
    for host, files in made.items():
        folder = out / host.replace(":", "_")
        folder.mkdir()
        write_key_pair(str(folder / "curve.key"), pair)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 2 with one line on stderr."""
    options = build_parser().parse_args(argv)
    try:
        made = folders(options)
        write(made, options.out)
    except FileExistsError:
        print(f"{PROGRAM}: {options.out} is there already: take another --out, or remove it", file=sys.stderr)
        return 2
    except (ConfigError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    for host in made:
        print(NEXT[options.form].format(folder=options.out / host.replace(":", "_"), host=host))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
