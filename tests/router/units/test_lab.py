"""Which processes a small service has, and what is refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig
from common.config.field import fields_of
from common.errors import ConfigError
from router.units.lab import Lab, device_flags


def lab(**given: Any) -> Lab:
    asked: dict[str, Any] = {"model": "tiny-random", "router": "10.0.0.6", "prefill": ("10.0.0.7",)}
    return Lab(**{**asked, "decode": ("10.0.0.8*2",), **given})


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_every_worker_is_where_the_router_looks_for_it() -> None:
    made = lab()
    assert [(unit.host, unit.name) for unit in made.units()] == [
        ("10.0.0.6", "router"),
        ("10.0.0.7", "prefill-worker-0"),
        ("10.0.0.8", "decode-worker-0"),
        ("10.0.0.8", "decode-worker-1"),
    ]
    settings = tomllib.loads(made.settings())
    assert settings["router"]["prefill"] == ["tcp://10.0.0.7:7001"]
    assert settings["router"]["decode"] == ["tcp://10.0.0.8:7001", "tcp://10.0.0.8:7011"]
    assert settings["decode_worker"] == {"model": "tiny-random"}


def test_processes_of_one_machine_have_ports_of_their_own() -> None:
    made = lab(router="10.0.0.8", prefill=("10.0.0.8*3", "10.0.0.9"), decode=("10.0.0.8*2",))
    ports = [
        (unit.host, flag(unit.flags, name))
        for unit in made.units()
        for name in ("--port", "--http-port", "--kv-port", "--lend-port")
        if name in unit.flags
    ]
    assert len(ports) == len(set(ports)) == 1 + 4 * 3 + 2 * 4
    names = [flag(unit.flags, "--worker-id") for unit in made.units() if unit.kind != "router"]
    assert len(set(names)) == 6


def test_every_flag_is_one_of_the_process() -> None:
    configs = {"router": RouterConfig, "prefill-worker": PrefillWorkerConfig, "decode-worker": DecodeWorkerConfig}
    for unit in lab().units():
        known = {field.flag: field for field in fields_of(configs[unit.kind])}
        for name, value in zip(unit.flags[::2], unit.flags[1::2], strict=True):
            known[name].check(known[name].parse(value))
    for section, values in tomllib.loads(lab().settings()).items():
        known_names = {field.name for field in fields_of(configs[section.replace("_", "-")])}
        assert values.keys() <= known_names


def test_a_name_is_told_to_others_and_an_address_is_bound() -> None:
    """A machine's own name is often 127.0.1.1 to itself."""
    router, prefill, decode = lab(router="node-a", prefill=("node-b",), decode=("fd00::7",)).units()
    assert flag(router.flags, "--host") == flag(prefill.flags, "--host") == "0.0.0.0"
    assert flag(prefill.flags, "--advertise-host") == "node-b"
    assert flag(decode.flags, "--host") == "fd00::7" and decode.address == "tcp://[fd00::7]:7001"
    assert decode.health_url == "http://[fd00::7]:7003/health"


def test_every_worker_of_a_machine_has_a_device_of_its_own() -> None:
    """A container of NVIDIA's runtime sees one alone, and calls it the first."""
    *_, first, second = lab().units()
    assert device_flags(lab().units()[0], "cuda", sees_all=True) == ()
    assert device_flags(first, "cpu", sees_all=True) == ("--device", "cpu")
    assert device_flags(first, "cuda", sees_all=True) == ("--device", "cuda:0")
    assert device_flags(second, "rocm", sees_all=True) == ("--device", "cuda:1")
    assert device_flags(second, "cuda", sees_all=False) == ("--device", "cuda:0")


def test_a_drain_is_waited_for() -> None:
    configs = (RouterConfig, PrefillWorkerConfig, DecodeWorkerConfig)
    drains = [field.default for config in configs for field in fields_of(config) if field.name == "drain_timeout_s"]
    for unit, drain_s in zip(lab().units(), drains, strict=False):
        assert unit.stop_timeout_s > drain_s


def test_a_path_with_odd_characters_stays_what_it_is() -> None:
    path = '/models/a "b" \\ c'
    assert tomllib.loads(lab(model=path).settings())["router"]["model"] == path


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ({"decode": ()}, "decode='' is refused: HOST"),
        ({"decode": ("10.0.0.8*0",)}, r"decode='10.0.0.8\*0' is refused"),
        ({"decode": ("a b",)}, "decode='a b' is refused"),
        ({"router": "10.0.0.6*2"}, "router='10.0.0.6.*is refused"),
        ({"worker_port": 65530}, "worker_port=65530 is refused: from 1, and 65550 must be a port"),
        ({"router": "10.0.0.8", "router_port": 7012}, "router_port=7012 is refused: none of 7000 to 7020"),
        ({"router_port": 0}, "router_port=0 is refused"),
    ),
)
def test_what_cannot_run_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lab(**given)
