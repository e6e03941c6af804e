"""Builds a release: wheel, sdist, bills of materials, images and chart. Optionally pushes and signs it: `make release`.

The output is in dist/. The chart archive contains the registry and, if images were pushed, their digests.
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

from common import __version__
from helm.images.build import (
    ROOT,
    Image,
    Options,
    ReleaseError,
    add_arguments,
    build,
    checked_registry,
    chosen_images,
    index_of,
    options_of,
    revision_and_epoch,
    run,
    tag_of,
)

BILLS = {
    "router": ("router",),
    "worker": ("worker", "torch"),
    "worker-cuda": ("worker", "cuda"),
    "worker-cuda-nixl": ("worker", "cuda", "nixl"),
}
"""Requirements in each bill of materials. `worker` is for images with torch from TORCH_INDEX, whose libraries vary."""


def make_packages(dist: Path, kernels: str) -> None:
    """Build the wheel, with the CPU kernels, and the sdist."""
    os.environ["DIPTYCH_KERNELS"] = kernels
    os.environ["SOURCE_DATE_EPOCH"] = revision_and_epoch()[1]
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT))


def make_bill(image: str, dist: Path) -> Path:
    """Write a bill of materials, without Debian, as CycloneDX JSON from pip requirements."""
    target = dist / f"diptych-{image}-{__version__}.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        held = Path(scratch) / "requirements.txt"
        held.write_text("".join(requirements(name) for name in BILLS[image]))
        command = (sys.executable, "-P", "-m", "cyclonedx_py", "requirements", str(held))
        options = ("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-format", "JSON")
        run(*command, *options, "--output-file", str(target))
    return target


def requirements(name: str) -> str:
    """Return a file of pinned requirements. For `torch`, return only the version: each index has other files."""
    if name != "torch":
        return (Path(__file__).parent / f"{name}.txt").read_text()
    lines = (Path(__file__).parent / "constraints.txt").read_text().splitlines()
    return next(f"{line}\n" for line in lines if line.startswith("torch=="))


def bill_of(image: Image, options: Options) -> str:
    """Return the name of the bill of materials of an image; "" if its packages are those of vLLM's image."""
    if image.variant == "vllm":
        return ""
    return image.name if image.name in BILLS and not index_of(image, options) else image.target


def pinned(values: str, registry: str, digests: Mapping[str, str]) -> str:
    """Insert registry and digests into values.yaml and keep its comments. Raises ReleaseError."""
    workers = ", ".join(f'{name}: "{digests.get(f"worker-{name}", "")}"' for name in ("cpu", "cuda", "rocm"))
    changes = (
        (r'(?m)^(images:\n(?:  #.*\n)*)  registry: ""$', rf'\g<1>  registry: "{registry}"'),
        (r'(?ms)^(images:\n.*?^  router:\n.*?)^    digest: ""$', rf'\g<1>    digest: "{digests.get("router", "")}"'),
        (r'(?m)^    digests: \{cpu: "", cuda: "", rocm: ""\}$', f"    digests: {{{workers}}}"),
    )
    for pattern, replacement in changes:
        values, count = re.subn(pattern, replacement, values, count=1)
        if count != 1:
            raise ReleaseError(f"helm/values.yaml has no match for {pattern}: update helm/images/release.py")
    return values


def make_chart(registry: str, digests: Mapping[str, str], dist: Path) -> Path:
    """Build the chart archive. It includes the registry, so installations do not have to set it."""
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / "diptych"
        shutil.copytree(ROOT / "helm", chart, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        values = chart / "values.yaml"
        values.write_text(pinned(values.read_text(), registry, digests))
        versions = ("--version", __version__, "--app-version", tag_of())
        run("helm", "package", str(chart), *versions, "--destination", str(dist))
    return dist / f"diptych-{__version__}.tgz"


def push_chart(chart: Path, registry: str) -> str:
    """Push the archive as an OCI artifact and return its name with digest. Raises ReleaseError."""
    output = run("helm", "push", str(chart), f"oci://{registry}/charts")
    found = re.search(r"sha256:[0-9a-f]{64}", output)
    if found is None:
        raise ReleaseError(f"helm push reported no digest: {output.strip()}")
    return f"{registry}/charts/diptych@{found[0]}"


def sign(names: Sequence[str], bills: Mapping[str, Path]) -> None:
    """Sign what was pushed with cosign (COSIGN_KEY), and attest the bills of materials of images."""
    key = ("--key", os.environ["COSIGN_KEY"]) if os.environ.get("COSIGN_KEY") else ()
    for name in names:
        run("cosign", "sign", "--yes", *key, name)
        if bill := bills.get(name):
            run("cosign", "attest", "--yes", *key, "--type", "cyclonedx", "--predicate", str(bill), name)


def write_sums(dist: Path) -> None:
    """Write SHA256SUMS for all files in dist/."""
    files = sorted(file for file in dist.iterdir() if file.is_file() and file.name != "SHA256SUMS")
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (dist / "SHA256SUMS").write_text("".join(lines))


def references(images: Sequence[Image], digests: Mapping[str, str], registry: str) -> dict[str, Image]:
    """Return the pushed images by name with digest."""
    pushed = {image: digests[image.name] for image in images if digests.get(image.name)}
    return {f"{image.reference(registry, '').rpartition(':')[0]}@{digest}": image for image, digest in pushed.items()}


def release(images: Sequence[Image], options: Options | None, registry: str, kernels: str, dist: Path) -> None:
    """Run all steps in order. Without `options`, build no images."""
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
            sign(
                [*names, pushed_chart],
                {name: bills[bill] for name, image in names.items() if (bill := bill_of(image, options))},
            )
        else:
            print("cosign is not installed: nothing was signed")
    write_sums(dist)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kernels", default="all", help="instruction sets of the kernels in the wheel")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="output folder; emptied first")
    arguments = parser.parse_args()
    registry = checked_registry(arguments.registry)
    if not shutil.which("helm"):
        raise ReleaseError("helm is not installed")
    images = () if arguments.images == "none" else chosen_images(arguments.images)
    release(images, options_of(arguments) if images else None, registry, arguments.kernels, arguments.dist)


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(f"make release: {error}")
