"""The page at /dashboard: its figures, and its script over a real router's /load. Needs node."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.api import pages

from . import chromium

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
DEADLINE_S = 60.0
KEY = "a-key-of-sixteen-or-more"
BROWSER = Path(__file__).with_name("browser.js")
SEES = ["until", "!get('picture').hidden"]


def figures(*expressions: str) -> list[Any]:
    """Values of expressions over the page's pure parts, `F` and `C`."""
    assert NODE is not None
    files = [json.dumps(str(pages.STATIC / "dashboard" / f"{part}.js")) for part in ("figures", "cards")]
    code = f"const [F, C] = [{files[0]}, {files[1]}].map(require);"
    code += f"console.log(JSON.stringify([{', '.join(expressions)}]))"
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


async def browse(url: str, *steps: Sequence[str]) -> list[Any]:
    """What the page shows at each step `show`."""
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        NODE,
        BROWSER,
        url,
        "/dashboard",
        json.dumps(steps),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.decode().splitlines()]


@pytest.mark.slow
def test_times_shares_and_ages_are_short() -> None:
    shown = figures("F.ms(0.031)", "F.ms(4.2)", "F.ms(312.4)", "F.ms(1500)", "F.ms(61000)", "F.ms(null)")
    assert shown == ["31.0 µs", "4.2 ms", "312 ms", "1.5 s", "61 s", "unbounded"]
    assert figures("F.percent(1)", "F.percent(0.998)", "F.percent(0.5)") == ["100 %", "99.8 %", "50 %"]
    assert figures("F.ago(0)", "F.ago(40)", "F.ago(600)", "F.ago(9000)") == [
        "just now", "40 s ago", "10 min ago", "3 h ago",
    ]  # fmt: skip


def test_it_asks_each_second_and_less_often_when_answers_take_long_or_fail() -> None:
    assert figures("F.pauseMs(0, 20)", "F.pauseMs(0, 300)", "F.pauseMs(0, 9000)") == [1000, 3000, 8000]
    assert figures("F.pauseMs(1)", "F.pauseMs(3)", "F.pauseMs(50)", "F.pauseMs(1, 5, 12)") == [2000, 8000, 30000, 12000]


def test_workers_in_trouble_come_first_and_a_page_shows_not_all_of_a_thousand() -> None:
    worker = {"num_requests": 0, "num_booked_requests": 0, "num_queued_tokens": 0, "num_available_blocks": 5}
    worker |= {"num_blocks": 10, "wait_s": 0, "tokens_per_s": 0, "reason": "", "step_model": {"num_steps": 0}}
    worker |= {"batch_cap": 4, "step_tokens": 0, "role": "decode", "home": "decode", "state": "ready"}
    many = [worker | {"address": f"tcp://d:{i}", "worker_id": f"decode-{i}"} for i in range(1000)]
    many[700] |= {"state": "dead", "reason": "silent for more than 3 s"}
    many[3] |= {"role": "prefill"}
    load = f"({json.dumps({'workers': many})})"
    rows, filtered, none = figures(
        f"F.workerRows({load})", f"F.workerRows({load}, ' DECODE-99 ready', 5)", f"F.workerRows({load}, 'x')"
    )
    assert [row["cells"][0]["text"] for row in rows["rows"][:4]] == ["decode-700", "decode-3", "decode-0", "decode-1"]
    assert rows["rows"][0]["cells"][2] == {"text": "dead: silent for more than 3 s", "level": "bad"}
    assert rows["rows"][1]["cells"][1] == {"text": "prefill (home: decode)", "level": "warm"}
    assert rows["rows"][2]["cells"][6] == {"text": "50 % of 10", "part": 0.5}
    assert (len(rows["rows"]), rows["summary"]) == (100, "100 of 1,000 workers")
    assert [row["key"] for row in filtered["rows"]] == [f"tcp://d:{i}" for i in (99, 990, 991, 992, 993)]
    assert (none["rows"], none["summary"]) == ([], "0 of 1,000 workers")


def test_of_several_models_each_worker_names_its_own() -> None:
    worker = {"num_requests": 0, "num_booked_requests": 0, "num_queued_tokens": 0, "num_available_blocks": 5}
    worker |= {"num_blocks": 10, "wait_s": 0, "tokens_per_s": 0, "reason": "", "step_model": {"num_steps": 0}}
    worker |= {"batch_cap": 4, "step_tokens": 0, "role": "decode", "home": "decode", "state": "ready", "model": "org/b"}
    workers = [worker | {"address": "tcp://d:1", "worker_id": "decode-1"}]
    both = [{"id": "a", "max_model_len": 10, "ready": True}, {"id": "b", "max_model_len": 2000, "ready": False}]
    load = f"({json.dumps({'workers': workers, 'models': both})})"
    one = f"({json.dumps({'workers': workers, 'models': both[:1]})})"
    several, found, alone, line = figures(
        f"F.workerRows({load})", f"F.workerRows({load}, 'org/b')", f"F.workerRows({one})", f"F.modelsLine({load})"
    )
    assert several["rows"][0]["cells"][0]["text"] == "decode-1 · org/b"
    assert (len(found["rows"]), alone["rows"][0]["cells"][0]["text"]) == (1, "decode-1")
    assert line == "a · at most 10 tokens, b · at most 2,000 tokens · no ready workers"


def test_the_plan_says_what_binds_and_what_cannot_be() -> None:
    pool = {"wanted": 3, "needed": 5, "present": 1, "reason": "KV blocks: 97% of 64 at p95 with 2 workers"}
    plan = {"pools": {"decode": pool}, "quantile": 0.95, "requests_per_s": 2.5, "unmet": "too dear", "held": ""}
    plan |= {"goals": {"ttft_ms": 500, "tpot_ms": 0}, "measured": {"ttft_ms": 0, "tpot_ms": 0}}
    plan |= {"predicted": {"ttft_ms": None, "tpot_ms": 20}}
    lines, off = figures(f"F.planLines({json.dumps({'plan': plan})})", "F.planLines({plan: null})")
    assert [line["text"] for line in lines] == [
        "The goals cannot be met: too dear",
        "decode: 1 present, 3 wanted, 5 needed. KV blocks: 97% of 64 at p95 with 2 workers",
        "TTFT at p95: predicted unbounded, the goal is 500 ms",
        "TPOT at p95: predicted 20 ms",
        "Offered load: 2.50 requests per second.",
    ]
    assert "--planner off" in off[0]["text"]


@pytest.mark.slow
def test_the_time_line_thins_and_shows_gaps() -> None:
    points = "[0, 1000, 2000, 100000].reduce((all, at) => F.remember(all, at, {n: at ? 1 : null}), [])"
    path, later = figures(f"F.line({points}, (p) => p.n, 2, 100000, 300, 100)", f"F.remember({points}, 301500, {{}})")
    assert path == "M3.0 50.0L6.0 50.0M300.0 50.0", "a line through two, and one behind a gap"
    assert [point["at"] for point in later] == [0, 2000, 100000, 301500]
    ages = ("[]", "[{at: 1e5}]", "[{at: 0}]", "[{at: -9e5}]")
    spans = figures(*(f"F.spanText(F.spanMs({age}, 130000))" for age in ages))
    assert spans == ["60 s ago", "60 s ago", "2 min ago", "5 min ago"]


TIMES = {"num": 4, "p50_ms": 120, "p90_ms": 480, "p99_ms": 1500}
NO_TIMES = dict.fromkeys(TIMES, 0)
RATES = {
    "requests_per_s": 2.5, "failed_per_s": 0, "prompt_tokens_per_s": 1200, "cached_tokens_per_s": 300,
    "output_tokens_per_s": 41, "transfers_per_s": 0.4, "transfer_bytes_per_s": 3.2e6,
}  # fmt: skip
TRAFFIC = {"rates": RATES, "ttft": TIMES, "tpot": NO_TIMES, "itl": NO_TIMES, "queue": NO_TIMES}
TRAFFIC |= {"transfer": TIMES, "exposed_transfer": NO_TIMES}
LOAD: dict[str, Any] = {"server_load": 3, "stages": {"queue": 1}, "workers": [], "classes": [], "plan": None}
LOAD |= {"traffic": TRAFFIC, "models": [{"id": "tiny", "max_model_len": 4096}]}


def cards(**fields: Any) -> dict[str, Any]:
    """The cards of a load, by key."""
    return {card["key"]: card for card in figures(f"C.all({json.dumps(LOAD | fields)})")[0]}


@pytest.mark.slow
def test_numbers_and_bytes_have_three_digits() -> None:
    assert figures("F.number(0)", "F.number(0.421)", "F.number(7.46)", "F.number(41)", "F.number(4210)") == [
        "0", "0.42", "7.5", "41", "4,210",
    ]  # fmt: skip
    assert figures("F.number(41234)", "F.number(3.14e6)") == ["41.2 k", "3.1 M"]
    sizes = ("F.bytes(0)", "F.bytes(999)", "F.bytes(1000)", "F.bytes(3.2e6)", "F.bytes(5e17)")
    assert figures(*sizes) == ["0 B", "999 B", "1.0 kB", "3.2 MB", "500000 TB"]


def test_the_worst_class_counts_and_none_where_there_is_no_goal() -> None:
    classes = [{"attainment": {"ttft": 0.9}}, {"attainment": {"ttft": 0.5, "tpot": 1}}, {"attainment": {}}]
    found = figures(*(f"F.sample({json.dumps(LOAD | {'classes': some})})" for some in (classes, classes[2:])))
    assert [(one["inFlight"], one["waiting"], one["ttftMet"], one["tpotMet"]) for one in found] == [
        (3, 1, 0.5, 1), (3, 1, None, None),
    ]  # fmt: skip
    assert (found[0]["ttft50"], found[0]["tpot50"]) == (120, None), "no answer, no time"


def test_the_cards_say_what_matters() -> None:
    default = {"name": "default", "ttft_ms": 400, "tpot_ms": 0, "attainment": {"ttft": 0.5}}
    worker = {"role": "decode", "state": "ready", "num_blocks": 100, "num_available_blocks": 2}
    found = cards(classes=[default], workers=[worker, worker | {"state": "dead", "num_available_blocks": 100}])
    values = {key: card["value"] for key, card in found.items()}
    assert values == {
        "requests": "2.5/s", "flight": "3", "output": "41/s", "goals": "50 %", "ttft": "120 ms",
        "tpot": "no recent answers", "kv": "98 %", "transfers": "3.2 MB/s",
    }  # fmt: skip
    assert (found["goals"]["level"], found["kv"]["level"]) == ("bad", "warm")
    texts = [detail["text"] for detail in found["ttft"]["details"]]
    assert texts == ["p50", "p90 480 ms", "p99 1.5 s", "goal 400 ms"]
    assert found["ttft"]["details"][1]["level"] == "warm", "the goal is exceeded"
    assert "25 % cached" in [detail["text"] for detail in found["output"]["details"]]


def test_the_summary_says_how_it_stands_and_what_is_wrong() -> None:
    prefill, decode = ({"role": role, "state": "ready"} for role in ("prefill", "decode"))
    missed = {"name": "default", "attainment": {"ttft": 0.5, "tpot": 1}}
    loads = [
        LOAD | {"workers": [prefill, decode], "stages": {"queue": 0}},
        LOAD | {"workers": [prefill, prefill | {"state": "suspect"}, decode | {"state": "dead"}], "classes": [missed]},
        LOAD | {"stages": {"queue": 2}, "plan": {"quantile": 0.4, "unmet": "too dear"}, "classes": [missed]},
    ]
    found = figures(*(f"C.summary({json.dumps(load)}).map((one) => [one.text, one.level])" for load in loads))
    assert found[0] == [["1 of 1 prefill workers ready", "good"], ["1 of 1 decode workers ready", "good"]]
    assert found[1] == [
        ["1 of 2 prefill workers ready", "warm"], ["0 of 1 decode workers ready", "bad"], ["goals are missed", "bad"],
        ["1 request waiting", "warm"],
    ]  # fmt: skip
    assert found[2] == [
        ["no prefill workers", ""], ["no decode workers", ""], ["goals are met", "good"],
        ["2 requests waiting", "warm"], ["the plan cannot meet the goals", "bad"],
    ]  # fmt: skip


def test_goals_are_met_or_missed_only_by_answers() -> None:
    quiet = {**TRAFFIC, "ttft": NO_TIMES}
    met = {"name": "default", "ttft_ms": 400, "tpot_ms": 0, "attainment": {"ttft": 1.0}}
    missed = met | {"attainment": {"ttft": 0.0}}
    found = [cards(traffic=quiet, classes=[one])["goals"]["value"] for one in (met, missed)] + [
        cards(classes=[met])["goals"]["value"]
    ]
    assert found == ["no recent answers", "0 %", "100 %"], "a refused request misses its goal"
    loads = (LOAD | {"traffic": quiet, "classes": [one]} for one in (met, missed))
    summaries = figures(*(f"C.summary({json.dumps(load)}).map((one) => one.text)" for load in loads))
    assert [[text for text in texts if "goals" in text] for texts in summaries] == [[], ["goals are missed"]]


def test_a_service_without_goals_and_workers_says_so() -> None:
    found = cards()
    assert (found["goals"]["value"], found["kv"]["value"]) == ("no goals set", "no ready workers")
    assert found["goals"]["none"] and found["kv"]["none"] and not found["ttft"]["none"]


def test_a_chart_is_as_high_as_its_lines_and_says_so_aloud() -> None:
    card, points = f"C.all({json.dumps(LOAD)})[4]", json.dumps([{"ttft50": 120, "ttft99": 1500}, {"ttft50": None}])
    high, least, label = figures(f"C.topOf({card}, {points})", f"C.topOf({card}, [])", f"C.labelOf({card}, 1500)")
    assert (high, least) == (1500, 1)
    assert label == "First token (TTFT): 120 ms, p50, p90 480 ms, p99 1.5 s; the top of the chart is 1.5 s"


def test_pools_sum_their_ready_workers() -> None:
    worker = {"role": "decode", "state": "ready", "num_requests": 4, "num_queued_tokens": 10}
    worker |= {"num_blocks": 100, "num_available_blocks": 25}
    (rows,) = figures(f"F.poolRows({json.dumps(LOAD | {'workers': [worker, worker | {'state': 'suspect'}]})})")
    prefill, decode = ([cell.get("text") if isinstance(cell, dict) else cell for cell in row["cells"]] for row in rows)
    assert prefill == ["Prefill", "0 of 0", "0", "0", "–"]
    assert decode == ["Decode", "1 of 2", "4", "10", "75 %"]
    assert rows[1]["cells"][1]["level"] == "warm"


@pytest.mark.slow
async def test_the_page_shows_what_the_router_says(start: Any) -> None:
    running = await start()
    shown = await browse(
        running.url, SEES, ["show", "text('workers')"], ["show", "text('classes')"], ["show", "text('stages')"],
        ["show", "text('plan')"], ["show", "text('age')"], ["show", "text('models')"], ["show", "text('pools')"],
        ["show", "text('workers-head')"], ["show", "get('workers').children[0].children[2].dataset.label"],
    )  # fmt: skip
    workers, classes, stages, plan, age, models, pools, head, label = shown
    assert models.startswith("tiny-random · ") and "Decode | 1 of 1" in pools
    assert head.startswith("Worker | Role | State") and label == "State"
    assert "decode-0" in workers and "ready" in workers
    assert classes.startswith("batch") and "3 (2 for busy workers)" in classes
    assert stages == "Waiting in the router | 0 | Decode | 2"
    assert "--planner off" in plan and age == "up to date"


@pytest.mark.slow
async def test_what_was_answered_shows_in_cards_and_times(start: Any) -> None:
    running = await start()
    assert (await running.completion(max_tokens=5)).status_code == 200
    shown = await browse(
        running.url, SEES, ["until", "text('cards').includes('First token (TTFT) | ')"],
        ["show", "text('times')"], ["show", "get('cards').children.map((card) => card.children[0].textContent)"],
        ["show", "get('cards').children[4].children[4].attributes['aria-label']"],
        ["until", "get('cards').children[4].children[4].children[0].attributes.d.startsWith('M')"],
    )  # fmt: skip
    times, names, label = shown
    assert (
        re.search(r"First token \| [\d.]+ (µs|ms|s) \|", times)
        and "KV transfer | 3.0 ms | 3.0 ms | 3.0 ms | 1 |" in times
    )
    assert names[:3] == ["Requests", "In flight", "Output tokens"]
    assert label.startswith("First token (TTFT): ")


@pytest.mark.slow
async def test_a_router_with_keys_shows_the_page_and_keeps_the_figures(start: Any) -> None:
    running = await start(api_key=KEY)
    shown = await browse(
        running.url, ["until", "!get('unlock').hidden"], ["show", "[text('unlock-title'), get('picture').hidden]"],
        ["do", "get('key').value = 'wrong-key-of-sixteen'; get('unlock').fire('submit')"],
        ["until", "text('unlock-title').includes('rejected')"], ["do", f"get('key').value = '{KEY}'"],
        ["do", "get('unlock').fire('submit')"], SEES, ["show", "[get('unlock').hidden, text('workers')]"],
        ["show", "sessionStorage.getItem('diptych.key')"], ["show", "asked.at(-1).Authorization"],
    )  # fmt: skip
    assert shown[0] == ["An API key is required", True]
    assert shown[1][0] and "decode-0" in shown[1][1]
    assert shown[2:] == [KEY, f"Bearer {KEY}"]


@pytest.mark.slow
async def test_a_key_without_rights_is_told_so(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "plain"\nkey = "{KEY}"\n')
    running = await start(api_key_file=str(keys))
    shown = await browse(
        running.url, ["until", "!get('unlock').hidden"], ["do", f"get('key').value = '{KEY}'"],
        ["do", "get('unlock').fire('submit')"], ["until", "text('unlock-title').includes('does not have permission')"],
        ["show", "text('unlock-why')"],
    )  # fmt: skip
    assert shown[0].startswith("Use a key with admin = true.")


@pytest.mark.slow
async def test_it_says_that_its_picture_is_old_and_asks_again(start: Any) -> None:
    running = await start()
    shown = await browse(
        running.url, SEES, ["do", "reached = false"], ["until", "!get('problem').hidden"], ["show", "text('problem')"],
        ["show", "text('said')"], ["do", "reached = true"], ["until", "get('problem').hidden"],
        ["show", "text('said')"],
    )  # fmt: skip
    assert shown == [
        "The router does not respond. The data shown is out of date.", "The router does not respond.",
        "The router responds again.",
    ]  # fmt: skip


@pytest.mark.slow
async def test_hidden_or_paused_it_does_not_ask(start: Any) -> None:
    running = await start()
    shown = await browse(
        running.url, SEES, ["do", "get('pause').fire('click')"], ["show", "[text('age'), get('pause').attributes]"],
        ["do", "var before = asked.length; document.fire('visibilitychange')"], ["show", "asked.length - before"],
        ["do", "document.hidden = true; get('pause').fire('click')"], ["show", "asked.length - before"],
        ["do", "document.hidden = false; document.fire('visibilitychange')"], ["show", "asked.length - before"],
    )  # fmt: skip
    assert shown == [["up to date, paused", {"aria-pressed": "true"}], 0, 0, 1]


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_a_real_browser_has_room_for_all_of_it(browser: Any, start: Any, width: int, height: int) -> None:
    running = await start()
    assert (await running.completion(max_tokens=5)).status_code == 200
    page = await browser.page(f"{running.url}/dashboard", width=width, height=height)
    await page.until("document.getElementById('times').innerText.includes('KV transfer')")
    assert "1 of 1 decode workers ready" in await page.text("#summary")
    assert await page.value("document.documentElement.scrollWidth <= innerWidth")
    wide = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth)"
    cut = f"{wide}.map((one) => one.innerText)"
    assert await page.value(cut) == []
    assert page.problems == []


def test_the_history_of_the_router_fills_what_the_page_did_not_see() -> None:
    wall, now = 1_800_000_000_000, 500_000
    past = [{"at": wall / 1000 - 10 * number, "n": number} for number in range(60, 0, -1)]
    history = json.dumps({"step_s": 10, "started_at": wall / 1000 - 605, "points": past})
    own = f"[{{at: {now - 15_000}, n: 7}}, {{at: {now - 14_000}, n: 8}}]"
    (points, again), path = figures(
        f"((once) => [once, F.joined(once, {history}, {now}, {wall})])(F.joined({own}, {history}, {now}, {wall}))",
        f"F.line(F.joined([], {history}, {now}, {wall}), (p) => p.n, 60, {now}, 300, 100, F.HOUR_MS)",
    )
    assert points == again and points[0] == {"at": now - 605_000, "begins": True}
    assert [point["n"] for point in points[-4:]] == [4, 3, 7, 8]
    assert path.count("M") == 1 and path.count("L") == 59


def test_the_first_points_of_a_page_continue_the_history_of_the_router() -> None:
    """Up to two steps lie between them, because the page keeps no point of the router within a step of its own."""
    wall, now = 1_800_000_000_000, 500_000
    points = [{"at": wall / 1000 - at, "n": 1} for at in (40, 30)]
    past = {"step_s": 10, "started_at": wall / 1000 - 99, "points": points}
    own = f"[{{at: {now - 11_000}, n: 1}}, {{at: {now - 10_000}, n: 1}}]"
    (path,) = figures(f"F.line(F.joined({own}, {json.dumps(past)}, {now}, {wall}), (p) => p.n, 5, {now}, 300, 100)")
    assert path.count("M") == 1 and path.count("L") == 3


def test_a_restart_of_the_router_is_a_gap() -> None:
    wall, now = 1_800_000_000_000, 500_000
    new = {"step_s": 10, "started_at": wall / 1000 - 12, "points": [{"at": wall / 1000 - 1, "n": 1}]}
    old = f"[{{at: {now - 30_000}, n: 5}}, {{at: {now - 20_000}, n: 5}}]"
    (path,) = figures(f"F.line(F.joined({old}, {json.dumps(new)}, {now}, {wall}), (p) => p.n, 5, {now}, 300, 100)")
    assert path.count("M") == 2 and path.count("L") == 1


def test_old_points_are_thinned_and_last_an_hour() -> None:
    grown = "Array.from({length: 4200}, (_, i) => i * 1000).reduce((all, at) => F.remember(all, at, {n: 1}), [])"
    (kept, first, path) = figures(
        f"({grown}).length", f"({grown})[0].at", f"F.line({grown}, (p) => p.n, 1, 4199000, 300, 100, F.HOUR_MS)"
    )
    assert 600 < kept < 700 and 599_000 < first <= 610_000
    assert path.count("M") == 1
