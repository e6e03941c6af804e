"""Classes of requests as operators write them."""

from __future__ import annotations

import pytest

from common.config import RouterConfig
from common.config.field import to_argv
from common.config.request_class import MAX_CLASSES, RequestClass
from common.config.sources import read
from common.errors import ConfigError

BUILT_IN = RequestClass("batch", priority=-10, is_built_in=True)


def config(*parts: str, **fields: object) -> RouterConfig:
    return RouterConfig(request_class=parts, **fields)  # type: ignore[arg-type]


def test_without_classes_there_is_one_with_the_goals_of_the_router() -> None:
    assert config(slo_ttft_ms=500.0).classes == {"default": RequestClass("default", 0.5), "batch": BUILT_IN}


def test_lines_of_batches_have_a_class_of_the_lowest_priority_unless_one_is_named() -> None:
    assert config("name=fast").classes["batch"] == BUILT_IN
    assert config("name=batch,priority=2").classes["batch"] == RequestClass("batch", priority=2)
    assert "batch" not in config("name=flex").classes
    names = [f"name=c{number}" for number in range(15)]
    assert len(config(*names).classes) == 17, "it takes no place of those that may be named"


def test_a_name_begins_the_next_class() -> None:
    classes = config("name=interactive,ttft_ms=500,tpot_ms=50,priority=5", "name=batch", "priority=-5").classes
    assert list(classes.values()) == [
        RequestClass(),
        RequestClass("interactive", 0.5, 0.05, 5),
        RequestClass("batch", priority=-5),
    ]


def test_classes_of_one_priority_may_have_shares() -> None:
    gold, silver = (config("name=gold,share=3", "name=silver").classes[name] for name in ("gold", "silver"))
    assert (gold.lane, gold.weight) == ("gold", 3.0)
    assert (silver.lane, silver.weight) == (RequestClass().lane, 1.0), "classes without a share have one together"


def test_flags_environment_and_the_next_process_say_the_same() -> None:
    said = ["--decode=tcp://127.0.0.1:1", "--request-class", "name=a,priority=1", "name=b,ttft_ms=9.5"]
    by_flag = read(RouterConfig, said, environ={})
    environ = {"DIPTYCH_ROUTER_REQUEST_CLASS": "name=a,priority=1,name=b,ttft_ms=9.5"}
    assert by_flag.classes == read(RouterConfig, said[:1], environ=environ).classes
    assert by_flag.classes == read(RouterConfig, to_argv(by_flag), environ={}).classes
    assert by_flag.classes["b"].ttft_s == 0.0095


def test_the_default_class_takes_what_is_said_of_it() -> None:
    classes = config("name=default,tpot_ms=40,priority=1", slo_ttft_ms=500.0).classes
    assert classes == {"batch": BUILT_IN, "default": RequestClass("default", 0.5, 0.04, 1)}


def test_a_class_refuses_what_would_miss_its_goals_only_where_it_says_so() -> None:
    classes = config("name=fast,ttft_ms=500,refuse=predicted", "name=slow,ttft_ms=5000").classes
    assert [classes[name].refuses_misses for name in ("default", "fast", "slow")] == [False, True, False]
    classes = config("name=slow,ttft_ms=5000", slo_ttft_ms=500.0, slo_refuse="predicted").classes
    assert [classes[name].refuses_misses for name in ("default", "slow")] == [True, False]
    assert config("name=default,priority=1", slo_refuse="predicted").classes["default"].refuses_misses
    assert not config("name=default,refuse=overload", slo_refuse="predicted").classes["default"].refuses_misses


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (("priority=3",), "after name="),
        (("name=a,ttft=3",), "with one of the keys name, ttft_ms, tpot_ms, priority"),
        (("name=a,priority",), "KEY=VALUE"),
        (("name=a", "name=a"), "a class that is defined once"),
        (("name=a,priority=1,priority=2",), "given once in class a"),
        (("name=Ab",), "lowercase letters"),
        (("name=a,priority=11",), "from -10 to 10"),
        (("name=a,share=0",), "share=0.*from 0.001 to 1000"),
        (("name=a,share=-1",), "from 0.001 to 1000"),
        (("name=a,share=inf",), "from 0.001 to 1000"),
        (("name=a,share=nan",), "from 0.001 to 1000"),
        (("name=a,share=half",), "share=half.*from 0.001 to 1000"),
        (("name=a,ttft_ms=-1",), "to 3600000 milliseconds"),
        (("name=a,tpot_ms=nan",), "to 3600000 milliseconds"),
        (("name=a,ttft_ms=9,refuse=all",), "refuse=all.*overload or predicted"),
        (("name=a,refuse=predicted",), "a class with ttft_ms or tpot_ms"),
        (("name=default,ttft_ms=300",), "equal to --slo-ttft-ms 500"),
        (tuple(f"name=c{i}" for i in range(MAX_CLASSES)), f"at most {MAX_CLASSES}"),
    ],
)
def test_what_contradicts_itself_is_refused(parts: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        config(*parts, slo_ttft_ms=500.0)
    assert refused.value.field == "request_class"
