"""Makes a release: wheel, sdist, bills of materials, images, chart; pushed and signed where told: `make release`.

What it makes lies in dist/. The chart's archive names the registry and, once images are pushed, their digests.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from helm.images.build import (
    ROOT,
    VERSION,
    Image,
    Options,
    ReleaseError,
    add_arguments,
    build,
    checked_registry,
    chosen_images,
    options_of,
    revision_and_epoch,
    run,
)

BILLS = ("router", "worker")


def make_packages(dist: Path, kernels: str) -> None:
    """Wheel, with the CPU's kernels, and sdist."""
    os.environ["DIPTYCH_KERNELS"] = kernels
    os.environ["SOURCE_DATE_EPOCH"] = revision_and_epoch()[1]
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT))


def make_bill(image: str, dist: Path) -> Path:
    """What an image holds beside Debian, in CycloneDX's JSON, from the requirements that pip installs."""
    target = dist / f"diptych-{image}-{VERSION}.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        held = Path(scratch) / "requirements.txt"
        packages = (Path(__file__).parent / f"{image}.txt").read_text()
        held.write_text(packages + (torch_pin() if image == "worker" else ""))
        command = (sys.executable, "-P", "-m", "cyclonedx_py", "requirements", str(held))
        options = ("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-format", "JSON")
        run(*command, *options, "--output-file", str(target))
    return target


def torch_pin() -> str:
    """The requirement of torch, which the image installs by itself."""
    lines = (Path(__file__).parent / "constraints.txt").read_text().splitlines()
    return next(f"{line}\n" for line in lines if line.startswith("torch=="))


def pinned(values: str, registry: str, digests: Mapping[str, str]) -> str:
    """The chart's values with registry and digests in them; their comments stay. Raises ReleaseError."""
    workers = ", ".join(f'{name}: "{digests.get(f"worker-{name}", "")}"' for name in ("cpu", "cuda", "rocm"))
    changes = (
        (r'(?m)^(images:\n(?:  #.*\n)*)  registry: ""$', rf'\g<1>  registry: "{registry}"'),
        (r'(?ms)^(images:\n.*?^  router:\n.*?)^    digest: ""$', rf'\g<1>    digest: "{digests.get("router", "")}"'),
        (r'(?m)^    digests: \{cpu: "", cuda: "", rocm: ""\}$', f"    digests: {{{workers}}}"),
    )
    for pattern, replacement in changes:
        values, count = re.subn(pattern, replacement, values, count=1)
        if count != 1:
            raise ReleaseError(f"helm/values.yaml has no {pattern}: helm/images/release.py no longer knows its form")
    return values


def make_chart(registry: str, digests: Mapping[str, str], dist: Path) -> Path:
    """The chart's archive. It names the registry, so an installation need not."""
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / "diptych"
        shutil.copytree(ROOT / "helm", chart, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        values = chart / "values.yaml"
        values.write_text(pinned(values.read_text(), registry, digests))
        run("helm", "package", str(chart), "--version", VERSION, "--app-version", VERSION, "--destination", str(dist))
    return dist / f"diptych-{VERSION}.tgz"


def push_chart(chart: Path, registry: str) -> str:
    """Push the archive as an OCI artifact: its name with its digest. Raises ReleaseError."""
    said = run("helm", "push", str(chart), f"oci://{registry}/charts")
    found = re.search(r"sha256:[0-9a-f]{64}", said)
    if found is None:
        raise ReleaseError(f"helm push named no digest: {said.strip()}")
    return f"{registry}/charts/diptych@{found[0]}"


def sign(names: Sequence[str], bills: Mapping[str, Path]) -> None:
    """Sign what was pushed, and attest images' bills of materials, by cosign and its own settings (COSIGN_KEY)."""
    key = ("--key", os.environ["COSIGN_KEY"]) if os.environ.get("COSIGN_KEY") else ()
    for name in names:
        run("cosign", "sign", "--yes", *key, name)
        if bill := bills.get(name):
            run("cosign", "attest", "--yes", *key, "--type", "cyclonedx", "--predicate", str(bill), name)


def write_sums(dist: Path) -> None:
    """SHA256SUMS of all that lies in dist/."""
    files = sorted(file for file in dist.iterdir() if file.is_file() and file.name != "SHA256SUMS")
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (dist / "SHA256SUMS").write_text("".join(lines))


def references(images: Sequence[Image], digests: Mapping[str, str], registry: str) -> dict[str, Image]:
    """Name with digest -> image, of those that were pushed."""
    pushed = [image for image in images if digests.get(image.name)]
    return {f"{image.reference(registry, VERSION).rpartition(':')[0]}@{digests[image.name]}": image for image in pushed}


def release(images: Sequence[Image], options: Options | None, registry: str, kernels: str, dist: Path) -> None:
    """All steps in order. Without options no images are built."""
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    make_packages(dist, kernels)
    bills = {name: make_bill(name, dist) for name in BILLS}
    digests = build(images, options) if options else {}
    chart = make_chart(registry, digests, dist)
    if options and options.push:
        names = references(images, digests, registry)
        (dist / "images.txt").write_text("".join(f"{name}\n" for name in names))
        pushed_chart = push_chart(chart, registry)
        if shutil.which("cosign"):
            sign([*names, pushed_chart], {name: bills[image.target] for name, image in names.items()})
        else:
            print("cosign is not installed: nothing is signed")
    write_sums(dist)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kernels", default="all", help="instruction sets of the wheel")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of what is made; emptied first")
    arguments = parser.parse_args()
    registry = checked_registry(arguments.registry)
    if not shutil.which("helm"):
        raise ReleaseError("helm is not installed here")
    images = () if arguments.images == "none" else chosen_images(arguments.images)
    release(images, options_of(arguments) if images else None, registry, arguments.kernels, arguments.dist)


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(f"make release: {error}")
