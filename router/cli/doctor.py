"""`diptych doctor`: check this machine and a running service, and write a bundle for a bug report.

Each check yields findings. What is printed and written has no secrets, prompts, host names or names of keys.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import resource
import shutil
import socket
import stat
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from common import __version__
from common.config import CONFIG_CLASSES, Config, RouterConfig, Sources, fields_of, located, with_flag
from common.errors import ConfigError
from common.machine import find_gpus, host_memory, nearest_existing
from common.model_files import cache_folder, hub_cache
from common.observe import in_bytes
from common.packages import foreign_packages
from router.cli.client_flags import DEFAULT_URL, doctor_parser
from router.cli.models.table import clean
from router.cli.router_client import NO_KEY, LoadSource, error_message, source_of
from router.cli.scrub import HIDDEN, Scrubber, secrets_in

PROG: Final = "diptych doctor"
OK, WARNING, FAILURE = "ok", "warning", "failure"
PACKAGES: Final = (
    "torch",
    "triton",
    "vllm",
    "transformers",
    "tokenizers",
    "pyzmq",
    "msgspec",
    "fastapi",
    "starlette",
    "uvicorn",
)
COMPILERS: Final = ("c++", "g++", "clang++")
"""Tried by workers in this order, unless CXX is set."""
KEY_FILES: Final = ("curve_key", "curve_authorized", "api_key_file", "tls_key")
LEAST_MEMORY: Final = 4 * 2**30
LEAST_DISK: Final = 5 * 10**9
LEAST_FILES: Final = 4096
MAX_SKEW_S: Final = 5.0
MAX_LINES: Final = 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """A sentence about one check, with what to do in it unless the level is OK."""

    level: str
    text: str


class Doctor:
    """Runs the checks. `files` are the contents of the bundle by name."""

    def __init__(self, source: LoadSource, *, given: bool, config: str, environ: Mapping[str, str]) -> None:
        """`given` is whether the user has named the router, which then must answer."""
        self._source, self._given = source, given
        self._config, self._environ = config, environ
        self.files: dict[str, str] = {}
        self.scrubber = Scrubber(secrets_in(environ) | ({source.key} if source.key else set()))
        self.scrubber.hide("host", (socket.gethostname(), socket.gethostname().partition(".")[0], source.host))

    def findings(self) -> Iterator[Finding]:
        """Run all checks."""
        checks = (self._versions, self._processor, self._memory, self._gpu, self._kernels, self._limits, self._disk)
        for check in (*checks, self._settings, self._service):
            try:
                yield from check()
            except Exception as error:  # a check that fails is a finding; the others still help
                yield Finding(WARNING, f"The check {check.__name__.strip('_')} failed ({error!r}). Report it as a bug.")

    # ------------------------------------------------------------ machine

    def _versions(self) -> Iterator[Finding]:
        found = {one.metadata["Name"].lower(): one.version for one in distributions() if one.metadata["Name"]}
        self.files["packages.txt"] = "\n".join(f"{name} {version}" for name, version in sorted(found.items()))
        named = ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
        yield Finding(OK, f"Diptych {__version__}, Python {platform.python_version()}, {platform.platform()}; {named}.")
        for name, place in foreign_packages():
            text = f"The package {name} comes from {place}. Install Diptych into its own environment."
            yield Finding(FAILURE, text)

    def _processor(self) -> Iterator[Finding]:
        flags: set[str] = set()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
        here = sorted(
            flag
            for flag in flags
            if flag.startswith(("avx2", "avx512", "amx", "fma", "f16c", "sve", "asimd", "bf16", "i8mm"))
        )
        usable, all_of = len(os.sched_getaffinity(0)), os.cpu_count()
        yield Finding(
            OK, f"{usable} of {all_of} cores are usable, {platform.machine()}: {' '.join(here) or 'no vector flags'}."
        )
        if platform.machine() == "x86_64" and "avx2" not in flags:
            yield Finding(
                WARNING, "This CPU has no AVX2: CPU kernels use the slow path. Use another machine for CPU workers."
            )

    def _memory(self) -> Iterator[Finding]:
        memory = host_memory()
        if memory is None:
            yield Finding(WARNING, "The available memory is unknown. Check that /proc is mounted.")
            return
        level = OK if memory.num_bytes >= LEAST_MEMORY else WARNING
        advice = "" if level == OK else " Stop other processes or choose a smaller model."
        yield Finding(level, f"{in_bytes(memory.num_bytes)} of memory are available ({memory.limit}).{advice}")

    def _gpu(self) -> Iterator[Finding]:
        gpus = find_gpus(self._environ)
        text = f"{gpus.num_gpus} GPUs are usable." if gpus.num_gpus else f"No GPU is usable: {gpus.refusal}."
        yield Finding(OK, text)

    def _kernels(self) -> Iterator[Finding]:
        spec = find_spec("kernels")
        if spec is None or spec.origin is None:
            yield Finding(WARNING, "The package kernels is missing. Reinstall Diptych to run workers here.")
            return
        shipped = sorted(one.name for one in Path(spec.origin).parent.rglob("built/*.so"))
        compiled = sorted(one.name for one in (cache_folder() / "native").glob("kernels-*.so"))
        named = self._environ.get("CXX", "")
        compiler = next((name for name in ([named] if named else COMPILERS) if shutil.which(name)), "")
        if shipped or compiled:
            yield Finding(OK, f"Compiled CPU kernels are present: {len(shipped or compiled)}.")
        elif compiler:
            yield Finding(OK, f"CPU kernels are not compiled yet; the first worker compiles them with {compiler}.")
        elif named:
            text = f"There are no compiled CPU kernels, and the compiler {named} does not exist. Correct or unset CXX."
            yield Finding(WARNING, text)
        else:
            yield Finding(
                WARNING, "There are no compiled CPU kernels and no C++ compiler. Install g++ for full speed on CPUs."
            )

    def _limits(self) -> Iterator[Finding]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        low = hard != resource.RLIM_INFINITY and hard < LEAST_FILES
        advice = f" Raise the hard limit above {LEAST_FILES:,} (LimitNOFILE, ulimit -Hn)." if low else ""
        yield Finding(WARNING if low else OK, f"Open files: soft limit {soft:,}, hard limit {shown}.{advice}")

    def _disk(self) -> Iterator[Finding]:
        for folder, name in ((cache_folder(), "DIPTYCH_CACHE"), (hub_cache(), "HF_HOME")):
            yield from self._folder(folder, name)
        shared = Path("/dev/shm")
        if shared.exists():
            yield Finding(OK, f"/dev/shm has {in_bytes(shutil.disk_usage(shared).free)} of free space.")

    def _folder(self, folder: Path, variable: str) -> Iterator[Finding]:
        place = nearest_existing(folder)
        free = shutil.disk_usage(place).free
        level = OK if free >= LEAST_DISK else WARNING
        advice = "" if level == OK else f" Delete models with diptych rm, or set {variable} to a larger disk."
        yield Finding(level, f"The cache {folder} has {in_bytes(free)} of free space.{advice}")
        if not os.access(place, os.W_OK):
            yield Finding(FAILURE, f"The cache {folder} is not writable. Set {variable} to a writable folder.")

    # ------------------------------------------------------------ settings

    def _settings(self) -> Iterator[Finding]:
        path, lines = self._config or self._environ.get("DIPTYCH_CONFIG", ""), []
        given: dict[type[Config], dict[str, Any]] = {}
        try:
            sources = Sources.open(path, self._environ, RouterConfig)
            for config in CONFIG_CLASSES:
                values, fields = sources.values(config), {field.name: field for field in fields_of(config)}
                given[config] = values
                self.scrubber.add(secrets_in({}, (str(values.get(name) or "") for name in KEY_FILES)))
                lines.append(f"[{config.section}]")
                for name, value in values.items():
                    shown = HIDDEN if fields[name].rule.secret else fields[name].render(value)
                    lines.append(f"{name} = {shown}")
        except ConfigError as error:
            yield Finding(FAILURE, f"The settings are invalid: {with_flag(error)}.")
        else:
            refused = list(_refused(given, sources))
            yield from refused
            number = sum(not line.startswith("[") for line in lines)
            origin = f"{path} and the environment" if path else "the environment"
            if not refused:
                yield Finding(OK, f"Valid settings from {origin}: {number}." if number else f"No settings in {origin}.")
        self.files["settings.toml"] = "\n".join(lines)

    # ------------------------------------------------------------ service

    def _service(self) -> Iterator[Finding]:
        source, asked = self._source, time.time()
        reply = source.get("/version")
        took_s = time.time() - asked
        if reply.problem:
            yield from self._no_service(reply.problem)
            return
        body = _parsed(reply.body)
        version = str(body.get("version", "")) if reply.status == 200 else ""
        if reply.status in (401, 403):
            yield Finding(WARNING, f"{NO_KEY[:1].upper()}{NO_KEY[1:]}.")
        elif not version:
            text = f"The server at {source.url} is not a Diptych router (HTTP {reply.status}). Check --url."
            yield Finding(FAILURE, text)
            return
        elif version == __version__:
            yield Finding(OK, f"The router at {source.url} has version {version}.")
        else:
            yield Finding(WARNING, f"The router has version {version}, this command {__version__}. Finish the upgrade.")
        if reply.date:
            skew_s = abs(parsedate_to_datetime(reply.date).timestamp() - asked - took_s / 2)
            if skew_s > MAX_SKEW_S:
                text = (
                    f"The clocks of this machine and of the router differ by {skew_s:.0f} s. Synchronise them (NTP); "
                )
                yield Finding(WARNING, f"{text}leases and certificates depend on them.")
            else:
                yield Finding(OK, "This machine and the router have the same time.")
        for path, meaning in (("/health", "healthy"), ("/ready", "ready")):
            reply = source.get(path)
            if reply.status == 200:
                yield Finding(OK, f"The router is {meaning}.")
            else:
                why = error_message(reply.body) or reply.problem or f"HTTP {reply.status}"
                yield Finding(FAILURE, f"The router is not {meaning}: {why.rstrip('.')}. See its log.")
        metrics = source.get("/metrics")
        if metrics.status == 200:
            text = metrics.body.decode(errors="replace")
            self.scrubber.hide("key", re.findall(r'\bkey="([^"]+)"', text))
            self.files["metrics.txt"] = text
        yield from self._workers()

    def _no_service(self, problem: str) -> Iterator[Finding]:
        port = self._source.port
        if self._given:
            yield Finding(
                FAILURE, f"{problem[:1].upper()}{problem[1:]}. Start the router, or check --url and the network."
            )
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                text = f"Port {port} is in use by another program ({error.strerror}). Set --port of diptych serve."
                yield Finding(WARNING, text)
            else:
                yield Finding(OK, f"No service runs at {self._source.url}, and port {port} is free.")

    def _workers(self) -> Iterator[Finding]:
        reply = self._source.get("/load")
        if reply.status in (401, 403):
            text = "The workers and warnings of the service are not included: set --api-key to an admin key."
            yield Finding(WARNING, text)
            return
        load = _parsed(reply.body)
        if reply.status != 200 or "workers" not in load:
            yield Finding(
                WARNING, f"/load does not answer ({reply.problem or f'HTTP {reply.status}'}). See the router's log."
            )
            return
        hosts = {urlsplit(str(one["address"])).hostname for one in load["workers"]}
        self.scrubber.hide("host", filter(None, hosts))
        self.files["load.json"] = json.dumps(load, indent=1)
        yield readiness(load)
        for one in [one for one in load["workers"] if one["state"] != "ready"][:MAX_LINES]:
            name = one["worker_id"] or one["address"]
            why = one["reason"] if one["reason"] not in ("", one["state"]) else "no reason is known"
            advice = f"See its log and the network to {one['address']}."
            yield Finding(WARNING, f"The {one['role']} worker {name} is {one['state']}: {why}. {advice}")
        for one in load.get("warnings", [])[:MAX_LINES]:
            yield Finding(WARNING, f"The router logged {one['age_s']:.0f} s ago: {one['text']}")


def _refused(given: Mapping[type[Config], dict[str, Any]], sources: Sources) -> Iterator[Finding]:
    """Check the settings of each process as the process does.

    A value for every process is only a warning if some processes accept it, because the others may not run here.
    """
    errors: dict[type[Config], ConfigError] = {}
    for config, values in given.items():
        try:
            config(**values)
        except ConfigError as error:
            errors[config] = error
    found: dict[Finding, list[str]] = {}
    for config, refusal in errors.items():
        place = sources.place(config, refusal.field, refusal.value)
        accepted = any(
            refusal.field in values and sources.place(other, refusal.field, refusal.value) == place
            for other, values in given.items()
            if other not in errors
        )
        finding = Finding(WARNING if accepted else FAILURE, str(located(refusal, config, {}, sources)))
        found.setdefault(finding, []).append(config.section.replace("_", "-"))
    for finding, names in found.items():
        yield Finding(finding.level, f"The settings are invalid for diptych {', '.join(names)}: {finding.text}.")


def readiness(load: Mapping[str, Any]) -> Finding:
    """Judge the number of ready workers. A service without any is well while all models can be loaded on demand."""
    states = {one.get("state") for one in load["models"]}
    if not load["workers"] and states == {"idle"}:
        return Finding(OK, f"No model is loaded. {len(load['models'])} can be loaded on demand.")
    num_ready = sum(one["state"] == "ready" for one in load["workers"])
    return Finding(OK if num_ready else FAILURE, f"{num_ready} of {len(load['workers'])} workers are ready.")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_bundle(path: Path, files: Mapping[str, str]) -> None:
    """Write the files as a tar.gz, readable by the user only. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)  # the file may have existed
        for name, text in files.items():
            content = text.encode()
            about = tarfile.TarInfo(f"diptych-doctor/{name}")
            about.size, about.mtime = len(content), int(time.time())
            archive.addfile(about, io.BytesIO(content))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, 1 if something is wrong, or 2 for invalid arguments."""
    options = doctor_parser().parse_args(argv)
    given = bool(options.url)
    options.url = options.url or DEFAULT_URL
    source = source_of(options, PROG)
    if source is None:
        return 2
    doctor = Doctor(source, given=given, config=options.config, environ=os.environ)
    findings = list(doctor.findings())  # all of them first, because later ones find more names to scrub
    report = "".join(f"{one.level:<8} {clean(doctor.scrubber.text(one.text))}\n" for one in findings)
    print(report, end="")
    failed = sum(one.level == FAILURE for one in findings)
    if options.output:
        files = {"report.txt": report} | {name: doctor.scrubber.text(text) for name, text in doctor.files.items()}
        try:
            write_bundle(Path(options.output), files)
        except OSError as error:
            print(f"{PROG}: cannot write {options.output}: {error.strerror}", file=sys.stderr)
            return 1
        print(f"\nWrote {options.output}: {', '.join(files)}. Read it before you attach it to a bug report.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
