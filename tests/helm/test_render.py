"""The chart renders, with both majors of helm, to objects that Kubernetes takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from yamllint import linter
from yamllint.config import YamlLintConfig

from .chart import CHART, EXAMPLES, KUBERNETES, OPERATORS, Refused, Rendered, render

pytestmark = pytest.mark.helm

# What these examples ask for by name cannot be had without the operator: the chart says so instead of leaving it out.
NEEDS = {
    "many-nodes": "ValidatingAdmissionPolicy|cert-manager.io/v1|gateway.networking.k8s.io/v1|keda.sh/v1alpha1",
    "several-models": "keda.sh/v1alpha1",
    "shared-router": "keda.sh/v1alpha1",
}
CORE = ("v1", "apps/v1", "batch/v1")


def check_schemas(rendered: Rendered, kubernetes: str) -> int:
    """Validates every object that Kubernetes itself defines and returns how many those were."""
    import kubernetes_validate  # two seconds, which no other test should wait for

    num_checked = 0
    for item in rendered.objects:
        group = item["apiVersion"].partition("/")[0]
        if item["apiVersion"] in CORE or group.endswith(".k8s.io") or group in ("policy", "autoscaling"):
            if group in ("gateway.networking.k8s.io", "inference.networking.k8s.io"):
                continue
            try:
                kubernetes_validate.validate(item, kubernetes, strict=True)
            except kubernetes_validate.ValidationError as error:
                pytest.fail(f"{item['kind']} {item['metadata']['name']}: {error.message}")
            num_checked += 1
    return num_checked


@pytest.mark.slow
def test_lint_finds_nothing(either_helm: Path) -> None:
    for name in ("", *EXAMPLES):
        files = ["-f", str(CHART / "examples" / f"{name}.yaml")] if name else []
        done = subprocess.run(
            [str(either_helm), "lint", "--strict", str(CHART), *files], capture_output=True, text=True, timeout=60
        )
        # `lint` knows no operators: what needs one is covered by the renders below.
        assert done.returncode == 0 or (name in NEEDS and "needs the API" in done.stdout + done.stderr), done.stdout


@pytest.mark.slow_except(f"{KUBERNETES[-1]}-operators-several-models")
@pytest.mark.parametrize("example", ("", *EXAMPLES))
@pytest.mark.parametrize(
    ("kubernetes", "operators"),
    [*((version, True) for version in KUBERNETES), (KUBERNETES[-1], False)],
    ids=[*(f"{version}-operators" for version in KUBERNETES), f"{KUBERNETES[-1]}-bare"],
)
def test_every_object_is_what_kubernetes_defines(helm4: Path, example: str, kubernetes: str, operators: bool) -> None:
    """Helm 3 renders the same, as another test shows."""
    examples = (example,) if example else ()
    apis = OPERATORS if operators else ()
    if example == "many-nodes" and kubernetes == "1.29":
        with pytest.raises(Refused, match=r"OCI image volume, which needs Kubernetes 1\.33"):
            render(helm4, *examples, kubernetes=kubernetes, apis=apis)
    elif not operators and example in NEEDS:
        with pytest.raises(Refused, match=NEEDS[example]):
            render(helm4, *examples, kubernetes=kubernetes, apis=apis)
    else:
        rendered = render(helm4, *examples, kubernetes=kubernetes, apis=apis)
        assert check_schemas(rendered, kubernetes) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("example", ("", *EXAMPLES))
def test_both_helms_render_the_same(helm3: Path, helm4: Path, example: str) -> None:
    examples = (example,) if example else ()
    three, four = (sorted(map(str, render(program, *examples).objects)) for program in (helm3, helm4))
    assert three == four


@pytest.mark.slow
@pytest.mark.parametrize("example", ("object-store", "rdma-nodes"))
def test_further_examples_are_what_kubernetes_defines(either_helm: Path, example: str) -> None:
    assert check_schemas(render(either_helm, example), KUBERNETES[-1]) >= 15


@pytest.mark.slow
def test_sources_are_tidy_yaml() -> None:
    rules = "{extends: relaxed, rules: {line-length: {max: 160}, key-duplicates: enable, truthy: enable}}"
    files = [
        CHART / "values.yaml",
        CHART / "Chart.yaml",
        CHART / "files" / "rules.yaml",
        *CHART.glob("examples/*.yaml"),
    ]
    for file in files:
        found = list(linter.run(file.read_text(encoding="utf-8"), YamlLintConfig(rules)))
        assert not [problem for problem in found if problem.level == "error"], f"{file.name}: {found}"


@pytest.mark.slow
def test_without_operators_nothing_of_theirs_is_made(helm4: Path) -> None:
    kinds = {item["apiVersion"].partition("/")[0] for item in render(helm4, apis=()).objects}
    assert kinds <= {"v1", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io"}


@pytest.mark.slow
def test_old_kubernetes_gets_an_older_pause(helm4: Path) -> None:
    router = "demo-diptych-router-smollm2-135m"
    for kubernetes, kind in (("1.29", "exec"), ("1.30", "sleep")):
        rendered = render(helm4, kubernetes=kubernetes)
        lifecycle = rendered.named("Deployment", router)["spec"]["template"]["spec"]["containers"][0]["lifecycle"]
        assert list(lifecycle["preStop"]) == [kind]


@pytest.mark.slow
def test_names_that_look_like_numbers_stay_names(helm4: Path) -> None:
    over = {
        "models": {"1": {"source": {"claimName": "123", "cacheClaim": "77", "cacheSize": "5"}}},
        "prefill": {"pools": {"true": {}}},
        "decode": {"pools": {"1e3": {}}},
        "curve": {"existingSecret": "0x1"},
        "test": {"apiKeySecret": {"name": "12", "key": "34"}},
        "workers": {"priorityClassName": "9", "autoscaling": {"type": "hpa"}},
    }
    rendered = render(helm4, over=over)
    assert check_schemas(rendered, "1.37") >= 15
    (decode,) = [item for item in rendered.of("Deployment") if item["metadata"]["labels"].get("diptych/pool") == "1e3"]
    assert decode["spec"]["selector"]["matchLabels"]["diptych/pool"] == "1e3"
