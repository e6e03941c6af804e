"""The lines that `diptych top` makes of an answer of /load."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest
from rich.console import Console, RenderableType

from router.api.load import load_body
from router.cli import top
from router.cli.top import BAD, WARM, WIDTH, picture
from router.dispatch.client import RequestTimeline
from router.dispatch.load import ClassLoad, DispatchLoad, WorkerLoad
from router.fleet.worker_monitor import FleetEvent
from router.observe.recent_traffic import RecentTraffic
from router.observe.request_record import ChoiceRecord, RequestRecord
from router.planner.loop import Outlook
from router.planner.offered_load import OfferedLoad
from router.planner.planner import Plan, PoolPlan
from router.planner.pool import Fleet, Goals
from router.planner.sizing import Prediction

DECODE = WorkerLoad("tcp://127.0.0.1:1", "decode", "decode-0", "ready", 3, 70, 25, 100, 3, 1234.0, 0.0, 0, 0, 0)
PREFILL = dataclasses.replace(DECODE, role="prefill", worker_id="prefill-0", address="tcp://127.0.0.1:2")
STAGES = {"queue": 1, "prefill": 0, "transfer": 0, "decode": 3}


def load_of(*workers: WorkerLoad, plan: Plan | None = None, served: int = 0, **fields: Any) -> dict[str, Any]:
    """An answer of /load, through JSON. `served` requests took 0.5 s to their first token."""
    traffic = RecentTraffic()
    line = RequestTimeline(transfer_s=0.02, exposed_transfer_s=0.001, transfer_bytes=3_000_000)
    choice = ChoiceRecord(0, 5, "stop", 1.5, 2.5, line)
    for _ in range(served):
        traffic.first_tokens(0.5, 5, 10.0)
        record = {"num_prompt_tokens": 300, "num_cached_tokens": 100, "choices": (choice,)}
        traffic.ended(RequestRecord("r", "/v1/completions", 1.0, 3.0, 200, **record), 10.0)  # type: ignore[arg-type]
    load = DispatchLoad(STAGES, workers, {}, {}, {}, 0, **fields)
    outlook = None if plan is None else Outlook(plan, OfferedLoad(rate=1.5), Fleet({}), (0.25, 0.0))
    models = [{"id": "tiny", "max_model_len": 4096, "ready": True}]
    body = load_body(load, outlook, Goals(), models, traffic.summary(11.0))
    answer: dict[str, Any] = orjson.loads(orjson.dumps(body))
    return answer


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the terminal, and the style of its text."""

    text: str
    style: str


def printed(shown: RenderableType, width: int = 2 * WIDTH) -> list[Line]:
    """The lines that a terminal shows."""
    console = Console(width=width, color_system="standard", force_terminal=True)
    lines = []
    for segments in console.render_lines(shown, pad=False):
        styles = {str(one.style) for one in segments if one.text.strip()}
        text = "".join(one.text for one in segments).rstrip()
        lines.append(Line(text, " ".join(styles - {"none", "None"})))
    return lines


def found(lines: list[Line], begin: str) -> Line:
    """The line that begins with a word."""
    (line,) = (line for line in lines if line.text.startswith(begin))
    return line


def test_what_is_going_on() -> None:
    lines = printed(picture(load_of(PREFILL, DECODE, served=4)))
    assert found(lines, "Model").text == "Model       tiny (4,096 tokens)"
    assert found(lines, "Requests").text == "Requests    4/s"
    assert found(lines, "In flight").text == "In flight   4: 1 waiting, 0 prompt, 0 KV transfer, 3 answer"
    assert found(lines, "Tokens").text == "Tokens      20/s output, 1,200/s prompt (33 % cached)"
    assert found(lines, "KV moved").text == "KV moved    12.0 MB/s in 4 transfers/s"
    assert found(lines, "Decode").text == "Decode      1 of 1 ready, KV blocks  75 % [|||||||||||||||     ]"
    times = found(lines, "First token").text.split()
    assert times[3] == times[5] and int(times[3]) in range(500, 526) and times[-1] == "4"
    assert "KV transfer" in found(lines, "KV transfer").text and "ms" in found(lines, "KV transfer").text


def test_of_several_models_each_worker_names_its_own() -> None:
    load = load_of(PREFILL, dataclasses.replace(DECODE, model="org/b"))
    both = [{"id": "a", "max_model_len": 10, "ready": True}, {"id": "b", "max_model_len": 2000, "ready": False}]
    lines = printed(picture(load | {"models": both}))
    assert found(lines, "Models") == Line("Models      a (10 tokens), b (2,000 tokens, no ready worker)", WARM)
    assert found(lines, "decode-0").text.endswith("1,234 org/b")


def test_a_service_that_did_nothing_has_no_times() -> None:
    lines = printed(picture(load_of()))
    assert found(lines, "First token").text.split()[2:] == ["(TTFT)", "-", "-", "-", "0"]
    assert found(lines, "Prefill").text == "Prefill     0 of 0 ready"
    assert not any(line.text.startswith(("class", "plan", "events")) for line in lines)


def test_a_missed_goal_stands_out() -> None:
    one = ClassLoad("default", ttft_ms=300.0, attainment={"ttft": 0.5})
    lines = printed(picture(load_of(DECODE, served=1, classes=(one,))))
    assert found(lines, "First token").style == WARM and found(lines, "First token").text.endswith("300 ms")
    assert found(lines, "default").style == BAD and found(lines, "default").text.endswith("50 %         -")


def test_the_plan_says_what_cannot_be() -> None:
    plan = Plan({"decode": PoolPlan(2, 3, 1, "KV blocks")}, Prediction(0.1, 0.02), unmet="too dear")
    lines = printed(picture(load_of(plan=plan)))
    assert found(lines, "The goals").text == "The goals cannot be met: too dear"
    assert found(lines, "decode:") == Line("decode: 1 present, 2 wanted, 3 needed. KV blocks", WARM)


def test_workers_in_trouble_come_first_and_their_reasons_follow() -> None:
    dead = dataclasses.replace(DECODE, worker_id="decode-7", state="dead", reason="silent for more than 3 s")
    lines = printed(picture(load_of(DECODE, PREFILL, dead)))
    begin = next(number for number, line in enumerate(lines) if line.text.startswith("worker"))
    assert [line.text.split()[0] for line in lines[begin + 1 : begin + 4]] == ["decode-7", "prefill-0", "decode-0"]
    assert lines[begin + 1].style == BAD and lines[begin + 4].text == "decode-7: silent for more than 3 s"
    assert lines[begin + 2].text.split()[2:] == ["ready", "3", "70", "0", "ms", "75", "%", "1,234"]


def test_of_many_workers_a_window_shows_a_part() -> None:
    many = [dataclasses.replace(DECODE, worker_id=f"decode-{number}") for number in range(1000)]
    lines = printed(picture(load_of(*many), 40))
    assert len(lines) == 40
    (more,) = (line.text for line in lines if line.text.startswith("... and"))
    shown = [line.text.split()[0] for line in lines if line.text.startswith("decode-")]
    assert shown[:3] == ["decode-0", "decode-1", "decode-2"] and f"{1000 - len(shown):,} more workers" in more
    assert len(printed(picture(load_of(*many)))) > 1000


def test_it_fits_80_columns() -> None:
    long = dataclasses.replace(DECODE, worker_id="a-worker-with-a-very-long-name-in-a-pod", wait_s=123456.0)
    one = ClassLoad("a-class-of-a-long-name-indeed", attainment={"ttft": 0.999, "tpot": 0.5})
    lines = printed(picture(load_of(long, PREFILL, served=2000, classes=(one,))), 200)
    assert max(len(line.text) for line in lines) <= WIDTH
    assert found(lines, "a-worker").text.split()[0] == "a-worker-with-a-ver…"


def test_a_worker_cannot_write_to_the_terminal() -> None:
    hostile = dataclasses.replace(DECODE, worker_id="a\x1b[2Jb", state="draining", reason="\x9b31mred\r\n")
    event = FleetEvent("lost", "w\x07", "decode", "gone\x1b]0;title\x07", 3.0)
    text = "".join(line.text for line in printed(picture(load_of(hostile, events=(event,)))))
    assert "a?[2Jb" in text and text.isprintable()


def test_a_worker_cannot_use_markup() -> None:
    hostile = dataclasses.replace(DECODE, worker_id="[bold]a", state="dead", reason="[/bold][red]b")
    lines = printed(picture(load_of(hostile)))
    assert found(lines, "[bold]a  ").style == BAD and found(lines, "[bold]a: ").text.endswith("[/bold][red]b")


def test_a_narrow_terminal_cuts_lines() -> None:
    lines = printed(picture(load_of(PREFILL, DECODE)), 40)
    assert max(len(line.text) for line in lines) == 40 and found(lines, "In flight").text.endswith("…")


@pytest.mark.parametrize(
    ("text", "shown"),
    [(top.number(0.421), "0.42"), (top.number(7.46), "7.5"), (top.number(4210.0), "4,210"),
     (top.number(41234.0), "41.2k"), (top.number(3.14e6), "3.1M"), (top.size(0), "0 B"),
     (top.size(1234), "1.2 kB"), (top.size(5e17), "500000 TB"), (top.duration(None), "no limit"),
     (top.duration(0), "0 ms"), (top.duration(1.26), "1.3 ms"), (top.duration(1500), "1.5 s"),
     (top.duration(61000), "61 s"), (top.ago(40), "40 s ago"), (top.ago(9000), "2 h ago"),
     (top.percent(0.998), "99.8 %")],
)  # fmt: skip
def test_numbers_are_short(text: str, shown: str) -> None:
    assert text == shown
