"""A machine's systemd units, and the script that installs them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from router.units.lab import Accelerator, Unit, device_flags

UNIT = """\
[Unit]
Description=Diptych {name}
Wants=network-online.target
After=network-online.target
# What dies is started again, however often: a machine that gives up is noticed too late.
StartLimitIntervalSec=0

[Service]
Type=exec
User=diptych
Group=diptych
# Read by root, handed over to this process alone.
LoadCredential=curve.key:/etc/diptych/curve.key
ExecStart={command}
Environment=DIPTYCH_CACHE=/var/cache/diptych HF_HOME=/var/cache/diptych/huggingface
Environment=HOME=/var/cache/diptych XDG_STATE_HOME=/var/lib/diptych TRITON_CACHE_DIR=/var/cache/diptych/triton
CacheDirectory=diptych
StateDirectory=diptych
Restart=always
RestartSec=2
# SIGTERM drains: running answers end, or move to another worker.
TimeoutStopSec={stop_timeout_s}
KillMode=mixed
LimitNOFILE=65536
NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
CapabilityBoundingSet=

[Install]
WantedBy=multi-user.target
"""

INSTALL = """\
#!/bin/sh
# Installs the units of {host} and starts them: as root, in this folder. Diptych itself must be at {program}.
set -eu
cd "$(dirname "$0")"
test -x {program} || {{ echo "install.sh: no {program}: install Diptych there first" >&2; exit 1; }}
id diptych >/dev/null 2>&1 ||
  useradd --system --user-group --no-create-home --home-dir /var/cache/diptych diptych{groups}
install -d -m 0755 /etc/diptych
install -m 0644 diptych.toml /etc/diptych/diptych.toml
install -m 0600 curve.key /etc/diptych/curve.key
install -m 0644 {units} /etc/systemd/system/
systemctl daemon-reload
systemctl enable {units}
systemctl restart {units}
"""
DEVICE_GROUPS = """
for group in video render; do getent group $group >/dev/null && usermod -aG $group diptych; done"""


def files(units: Sequence[Unit], program: str, accelerator: Accelerator = "cpu") -> Mapping[str, str]:
    """File name -> content, for one machine."""
    made = {f"diptych-{unit.name}.service": _unit(unit, program, accelerator) for unit in units}
    names = " ".join(shlex.quote(name) for name in made)
    groups = "" if accelerator == "cpu" else DEVICE_GROUPS
    script = INSTALL.format(host=units[0].host, program=shlex.quote(program), units=names, groups=groups)
    return {**made, "install.sh": script}


def _unit(unit: Unit, program: str, accelerator: Accelerator) -> str:
    devices = device_flags(unit, accelerator, sees_all=True)
    arguments = [unit.kind, "--config", "/etc/diptych/diptych.toml", *unit.flags, *devices]
    words = [*(_escaped(part) for part in (program, *arguments)), "--curve-key", "${CREDENTIALS_DIRECTORY}/curve.key"]
    return UNIT.format(name=unit.name, command=" ".join(words), stop_timeout_s=unit.stop_timeout_s)


def _escaped(part: str) -> str:
    """A word of a command as systemd reads it: %, $ and \\ mean something."""
    return part.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
