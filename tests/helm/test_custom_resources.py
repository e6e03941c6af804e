"""Objects of operators have the fields, and only those, that the operators' own types know."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .chart import EXAMPLES, Object, Rendered, render
from .programs import NotAvailable, tools_folder

pytestmark = [pytest.mark.helm, pytest.mark.slow]


# What fields custom resources have, read from the TypeScript types of pinned npm packages, as strict checks.

# API group -> package, version and SHA-256 of the archive that `npm pack` brings.
PACKAGES = {
    "keda.sh": ("keda", "2.0.0", "825e7b45dfd9da8dfdfd838a6d31e2e180c8491c8e493c3822f9123e49ceffef"),
    "monitoring.coreos.com": (
        "prometheus-operator",
        "6.0.0",
        "e92402ebff400ea1ca5fe60546554841ab6f5986b317f3f0d4cb756dc88fbd37",
    ),
    "gateway.networking.k8s.io": (
        "gateway-api",
        "2.0.0",
        "505c284b74d2f71803803543816abe3fe58e4b0ec6d98f3bd4989726d469b81b",
    ),
    "cert-manager.io": ("cert-manager", "6.0.0", "0e5bc3ff9c20a588abdfcc34590442cc40b3037d789ec74acb59119aac4fbfed"),
}
TOKEN = re.compile(r'"[^"]*"|-?[0-9]+|[A-Za-z_][\w.]*|[{}\[\]<>|:;?=,()&]')
PRIMITIVES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "boolean": (bool,)}
FETCH_TIMEOUT_S = 100.0


def package(group: str) -> Path:
    """The unpacked types of an API group. Raises NotAvailable."""
    name, version, sha256 = PACKAGES[group]
    folder = tools_folder() / f"{name}-{sha256[:12]}"
    with (tools_folder() / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _fetch(f"@kubernetes-models/{name}@{version}", sha256, folder)
    return folder / "package"


def _fetch(name: str, sha256: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise NotAvailable("npm, which fetches the types of custom resources, is not installed")
    scratch = folder.with_suffix(".fetch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    line = ["npm", "pack", "--silent", "--pack-destination", str(scratch), name]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"{name} did not arrive within {FETCH_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise NotAvailable(f"npm could not fetch {name}: {done.stderr.strip()[-200:]}")
    archive = next(scratch.glob("*.tgz"))
    actual = hashlib.sha256(archive.read_bytes()).hexdigest()
    if actual != sha256:
        raise NotAvailable(f"{name} has SHA-256 {actual}, not {sha256}")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    scratch.replace(folder)


@dataclass(frozen=True)
class Shape:
    """A type: what kind it is, and its parts (fields with whether they must be there, choices, or the type inside)."""

    kind: str
    fields: dict[str, tuple[bool, Shape]] | None = None
    inner: Shape | None = None
    choices: tuple[Any, ...] = ()


ANY = Shape("any")


class Parser:
    """Reads one type out of a declaration file; names lead to other files of the package."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = re.sub(r"/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.S)
        self.imports = dict(re.findall(r'import \{ (\w+) \} from "(\.[^"]*)\.js"', text))
        self.text = text

    def parse(self) -> Shape:
        stem = self.file.name.removesuffix(".d.ts")
        if found := re.search(rf"export declare class {stem}\b[^{{]*\{{(.*?)\n\}}", self.text, flags=re.S):
            body = re.split(r"\n    (?:static|constructor)", found[1])[0]
            self.tokens = [*TOKEN.findall(body), "}"]
            return self._object()
        found = re.search(rf"export type I{stem} = (.*?);\n", self.text, flags=re.S)
        assert found, self.file
        self.tokens = [*TOKEN.findall(found[1]), ";"]
        return self._union()

    def _object(self) -> Shape:
        fields: dict[str, tuple[bool, Shape]] = {}
        while (token := self.tokens.pop(0)) != "}":
            if token == "[":  # [key: string]: T
                while self.tokens.pop(0) != "]":
                    pass
                assert self.tokens.pop(0) == ":"
                value = self._union()
                assert self.tokens.pop(0) == ";" and self.tokens.pop(0) == "}"
                return Shape("map", inner=value)
            optional = self.tokens[0] == "?"
            if optional:
                self.tokens.pop(0)
            assert self.tokens.pop(0) == ":", (self.file, token)
            fields[token.strip('"')] = (not optional, self._union())
            assert self.tokens.pop(0) == ";", (self.file, token)
        return Shape("object", fields)

    def _union(self) -> Shape:
        parts = [self._one()]
        while self.tokens[0] == "|":
            self.tokens.pop(0)
            parts.append(self._one())
        choices = tuple(choice for part in parts for choice in part.choices)
        if choices and len(choices) == len(parts):
            return Shape("choice", choices=choices)
        return parts[0] if len(parts) == 1 else ANY

    def _one(self) -> Shape:
        token = self.tokens.pop(0)
        if token.startswith('"'):
            return Shape("choice", choices=(token.strip('"'),))
        if token.lstrip("-").isdigit():
            return Shape("choice", choices=(int(token),))
        if token == "{":
            return self._object()
        if token == "Array":
            assert self.tokens.pop(0) == "<"
            inner = self._union()
            assert self.tokens.pop(0) == ">"
            return Shape("list", inner=inner)
        if token in PRIMITIVES:
            return Shape(token)
        if token in self.imports:
            return shape_of((self.file.parent / f"{self.imports[token]}.d.ts").resolve())
        return ANY  # of Kubernetes itself, or free-form


@cache
def shape_of(file: Path) -> Shape:
    return Parser(file).parse()


def problems(value: Any, shape: Shape, path: str = "") -> list[str]:
    """What in `value` is not as `shape` says; fields that it does not know are problems too."""
    if shape.kind in PRIMITIVES:
        fits = isinstance(value, PRIMITIVES[shape.kind]) and (shape.kind == "boolean" or not isinstance(value, bool))
        return [] if fits else [f"{path}: {value!r} is no {shape.kind}"]
    if shape.kind == "choice":
        return [] if value in shape.choices else [f"{path}: {value!r} is none of {shape.choices}"]
    if shape.kind == "list" and shape.inner:
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [each for i, item in enumerate(value) for each in problems(item, shape.inner, f"{path}[{i}]")]
    if shape.kind in ("map", "object") and not isinstance(value, dict):
        return [f"{path}: {value!r} is no object"]
    if shape.kind == "map" and shape.inner:
        return [each for key, item in value.items() for each in problems(item, shape.inner, f"{path}.{key}")]
    if shape.fields is None:
        return []
    missing = [
        f"{path}.{name} is missing" for name, (needed, _) in shape.fields.items() if needed and name not in value
    ]
    unknown = [f"{path}.{name} does not exist" for name in value if name not in shape.fields]
    known = [name for name in value if name in shape.fields]
    return [
        *missing,
        *unknown,
        *(each for name in known for each in problems(value[name], shape.fields[name][1], f"{path}.{name}")),
    ]


def check(item: Object) -> list[str]:
    group, _, version = item["apiVersion"].partition("/")
    try:
        file = package(group) / group / version / f"{item['kind']}.d.ts"
    except NotAvailable as error:
        pytest.skip(str(error))
    return problems(item, shape_of(file.resolve()), item["kind"])


def custom(rendered: Rendered) -> list[Object]:
    return [item for item in rendered.objects if item["apiVersion"].partition("/")[0] in PACKAGES]


def everything(helm: Path) -> list[Object]:
    monitors = {"podMonitor": {"enabled": False}, "serviceMonitor": {"enabled": True}}
    rendered = [render(helm, name) for name in EXAMPLES]
    return [item for each in (*rendered, render(helm, over={"monitoring": monitors})) for item in custom(each)]


def test_every_field_of_every_custom_resource_exists(helm4: Path) -> None:
    found = everything(helm4)
    kinds = {"ScaledObject", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute", "Certificate"}
    assert {item["kind"] for item in found} == kinds
    for item in found:
        assert not check(item)


def test_a_misspelt_field_would_be_found(helm4: Path) -> None:
    scaled = next(item for item in everything(helm4) if item["kind"] == "ScaledObject")
    wrong = copy.deepcopy(scaled)
    wrong["spec"]["fallback"]["behaviour"] = wrong["spec"]["fallback"].pop("behavior")
    wrong["spec"]["triggers"][0]["metadata"]["threshold"] = 1
    wrong["spec"]["pollingInterval"] = "10"
    assert len(check(wrong)) == 3


def test_an_inference_pool_leads_to_router_pods(helm4: Path) -> None:
    picker = {"enabled": True, "endpointPicker": {"name": "epp", "port": 9002}}
    rendered = render(helm4, over={"inferencePool": picker})
    (pool,) = rendered.of("InferencePool")
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    reference = pool["spec"]["endpointPickerRef"]
    assert reference == {"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    template = rendered.named("Deployment", pool["metadata"]["name"])["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"] == [{"number": template["spec"]["containers"][0]["ports"][0]["containerPort"]}]


def test_a_route_may_lead_to_the_inference_pool(helm4: Path) -> None:
    picker = {"enabled": True, "endpointPicker": {"name": "epp", "port": 9002}}
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "toInferencePool": True, "requestTimeout": ""}
    rendered = render(helm4, over={"inferencePool": picker, "httpRoute": route})
    ((found,), (pool,)) = (rendered.of(kind) for kind in ("HTTPRoute", "InferencePool"))
    assert not check(found)
    (rule,) = found["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    target = {"name": pool["metadata"]["name"], "group": group, "kind": "InferencePool", "weight": 100}
    assert rule["backendRefs"] == [target] and "timeouts" not in rule
