"""Builds the images with docker, podman or buildah and optionally pushes them: `make images`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import __version__

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("docker", "podman", "buildah")
HOST = re.compile(r"^([\w-]+\.[\w.-]+|[\w.-]+:\d+|localhost)(/[\w./-]+)?$")


class ReleaseError(Exception):
    """A setting, a program or a file is missing or invalid. The message includes the remedy."""


@dataclass(frozen=True)
class Image:
    """An image: a target of the Dockerfile and, for a worker, its accelerator and its variant with build arguments."""

    target: str
    accelerator: str = ""
    variant: str = ""
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def build(self) -> str:
        """Accelerator and variant: the suffix of the tag, and the key in TORCH_INDEX."""
        return "-".join(filter(None, (self.accelerator, self.variant)))

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.target, self.build)))

    def reference(self, registry: str, tag: str) -> str:
        tag = "-".join(filter(None, (tag, self.build)))
        return f"{registry}/diptych-{self.target}:{tag}"


IMAGES = (Image("router"), *(Image("worker", accelerator) for accelerator in ("cpu", "cuda", "rocm")))
OLDER_CUDA = Image("worker", "cuda", "12.8", (("CUDA_VERSION", "12.8"),))
"""For drivers below 580. PyPI has no torch for it."""
VARIANTS = (
    *(Image("worker", accelerator, "nixl", (("NIXL", "yes"),)) for accelerator in ("cpu", "cuda")),
    OLDER_CUDA,
    Image("worker", "cuda", "vllm", (("ENGINE", "vllm"),)),
)
"""Images that are built only if they are named."""


@dataclass(frozen=True)
class Options:
    """Registry and build options of the images."""

    registry: str
    engine: str
    push: bool = False
    python_image: str = ""
    torch_index: tuple[tuple[str, str], ...] = ()
    """Pairs of an accelerator, or accelerator and variant, and the address of its package index."""
    cuda_version: str = ""
    pip_conf: str = ""


def checked_registry(registry: str) -> str:
    """Return the registry: a host and an optional path. Raises ReleaseError."""
    found = registry.strip().removesuffix("/")
    if not HOST.match(found):
        given = f"{found!r} names no host" if found else "it is not set"
        raise ReleaseError(
            f"REGISTRY: {given}. Set the host and path that images are pushed to, for example REGISTRY=ghcr.io/acme; "
            "nodes resolve a short name with their own default registry."
        )
    return found


def chosen_images(names: str) -> tuple[Image, ...]:
    """Return the images of a comma-separated list, or those without a variant for "". Raises ReleaseError."""
    known = {image.name: image for image in (*IMAGES, *VARIANTS)}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or [image.name for image in IMAGES]
    if unknown := [name for name in wanted if name not in known]:
        raise ReleaseError(f"IMAGES: {unknown[0]!r} is unknown; available: {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def chosen_engine(name: str) -> str:
    """Return the program that builds the images. Raises ReleaseError."""
    if found := next((each for each in ([name] if name else ENGINES) if shutil.which(each)), ""):
        return found
    raise ReleaseError(f"ENGINE: {name or 'none of ' + ', '.join(ENGINES)} is not installed")


def build_command(
    image: Image, options: Options, *, revision: str, epoch: str, version: str = __version__
) -> list[str]:
    """Return the command that builds an image."""
    arguments = {"VERSION": version, "REVISION": revision, "SOURCE_DATE_EPOCH": epoch}
    if options.python_image:
        arguments["PYTHON_IMAGE"] = options.python_image
    if image.accelerator:
        arguments["ACCELERATOR"] = image.accelerator
        if index := index_of(image, options):
            arguments["TORCH_INDEX"] = index
    if image.accelerator == "cuda" and options.cuda_version:
        arguments["CUDA_VERSION"] = options.cuda_version
    arguments |= dict(image.arguments)
    reference = image.reference(options.registry, tag_of(version))
    command = [options.engine, "build", "--target", image.target, "--tag", reference]
    command += [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    if options.pip_conf:
        command += ["--secret", f"id=pip,src={options.pip_conf}"]
    return [*command, str(ROOT)]


def tag_of(version: str = __version__) -> str:
    """Return the tag of a version's images. It ends in "-dirty" if the tree has uncommitted changes."""
    changed = git("status", "--porcelain").stdout
    return version.replace("+", "-") + ("-dirty" if changed else "")


def index_of(image: Image, options: Options) -> str:
    """Return the package index with torch for an image; "" for pip's own. Raises ReleaseError."""
    indexes = dict(options.torch_index)
    if image == OLDER_CUDA:
        if index := indexes.get(image.build):
            return index
        raise ReleaseError(f"TORCH_INDEX: {image.name} needs {image.build}=ADDRESS, PyTorch's index for CUDA 12.8")
    return indexes.get(image.accelerator, "")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git on this checkout, even if another user owns it, but never on an enclosing repository."""
    command = ("git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", *arguments)
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", "git is not installed")


def run(*command: str) -> str:
    """Run a program and return its output. Raises ReleaseError with the end of the output."""
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{command[0]} {command[1]} exited with {done.returncode}: {done.stdout[-2000:].strip()}")
    return done.stdout


def push(engine: str, reference: str) -> str:
    """Push an image and return its digest in the registry. Raises ReleaseError."""
    if engine == "docker":
        run(engine, "push", reference)
        repository = reference.rpartition(":")[0]
        names = json.loads(run(engine, "image", "inspect", "--format", "{{json .RepoDigests}}", reference))
        found = next((name.partition("@")[2] for name in names if name.startswith(f"{repository}@")), "")
    else:
        with tempfile.NamedTemporaryFile("r") as file:
            run(engine, "push", "--digestfile", file.name, reference)
            found = file.read().strip()
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
        raise ReleaseError(f"{engine} reported no digest of {reference} after the push")
    return found


def revision_and_epoch() -> tuple[str, str]:
    """Return the commit and its time, or ("unknown", "0") outside a repository."""
    done = git("log", "-1", "--format=%H %ct")
    revision, _, epoch = done.stdout.strip().partition(" ")
    return (revision, epoch) if done.returncode == 0 else ("unknown", "0")


def build(images: Sequence[Image], options: Options) -> dict[str, str]:
    """Build the images, then push them if requested. Return a digest by image name, "" if it was not pushed."""
    revision, epoch = revision_and_epoch()
    digests = {}
    for command in [build_command(image, options, revision=revision, epoch=epoch) for image in images]:
        run(*command)
    for image in images:  # publish nothing unless all images were built
        digests[image.name] = push(options.engine, image.reference(options.registry, tag_of())) if options.push else ""
    return digests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registry", default="", help="host and path of the images")
    parser.add_argument("--images", default="", help="images to build, separated by commas (default: all)")
    parser.add_argument("--engine", default="", help=f"{', '.join(ENGINES)} (default: the first that is installed)")
    parser.add_argument("--push", default="", choices=("", "yes", "no"), help="yes: push the built images")
    parser.add_argument("--python-image", default="", help="base image; for a release, include its digest")
    parser.add_argument("--torch-index", default="", help="ACCELERATOR=ADDRESS,...: package indexes with torch builds")
    parser.add_argument("--cuda-version", default="", help="minimum CUDA version of the node's driver")
    parser.add_argument("--pip-conf", default="", help="pip configuration file for the build")


def options_of(arguments: argparse.Namespace) -> Options:
    """Validate the arguments. Raises ReleaseError."""
    pairs = [pair.partition("=") for pair in arguments.torch_index.split(",") if pair]
    variants = {*(image.accelerator for image in IMAGES), OLDER_CUDA.build} - {""}
    if wrong := next((key for key, _, address in pairs if key not in variants or not address), ""):
        raise ReleaseError(
            f"TORCH_INDEX: {wrong!r}: write ACCELERATOR=ADDRESS for one of {', '.join(sorted(variants))}"
        )
    return Options(
        checked_registry(arguments.registry),
        chosen_engine(arguments.engine),
        arguments.push == "yes",
        arguments.python_image,
        tuple((key, address) for key, _, address in pairs),
        arguments.cuda_version,
        arguments.pip_conf,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    images = chosen_images(arguments.images)
    options = options_of(arguments)
    for name, digest in build(images, options).items():
        print(name, digest or "(not pushed)")
    print(f"to install: helm install ... --set images.registry={options.registry} --set images.tag={tag_of()}")


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(f"make images: {error}")
