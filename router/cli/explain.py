"""`diptych explain REQUEST_ID`: show why a request ran on its workers, and its predicted and measured times."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.cli.client_flags import explain_parser
from router.cli.models.table import clean, duration
from router.cli.router_client import refusal_of, source_of

PROG = "diptych explain"
BAR = 32
"""Columns of the timeline."""
WIDTH = 110
"""Columns of a sentence."""
GOALS = {"ttft": "first token (TTFT)", "tpot": "per later token (TPOT)"}
PARTS = ("queue", "prefill", "lag", "transfer", "slot", "token")
"""Predicted times of a candidate that are shown, each as `NAME_ms`."""


def text_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of an explanation, without control characters."""
    return map(clean, _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    def ms(value: float | None, *, unknown: str = "-") -> str:
        return unknown if value is None else duration(value)

    owner = f", key {found['key']}" if found["key"] else ""
    yield f"request {found['request_id']}  {found['id']}".rstrip()
    yield f"  {found['path']}, model {found['model'] or 'unknown'}, class {found['class']}{owner}"
    status = "" if found["status"] is None else f" with status {found['status']}"
    error = f": {found['error']}: {found['reason']}" if found["error"] else ""
    yield f"  arrived {found['arrived_at']}, {found['state']}{status} after {ms(found['total_ms'])}{error}"
    tokens = f"prompt {found['prompt_tokens']:,} tokens ({found['cached_tokens']:,} from a prefix cache)"
    yield f"  {tokens}, output {found['output_tokens']:,} tokens"
    for choice in found["choices"]:
        yield ""
        if found["num_choices"] > 1:
            yield f"choice {choice['index']} of {found['num_choices']:,}"
        yield from _stages(choice, found["total_ms"], ms)
        yield from _goals(choice, ms)
        yield from (f"{'':2}{line}" for line in _decisions(choice, ms))
        yield "  steps"
        for step in choice["steps"]:
            yield f"    {ms(step['at_ms']):>9}  {step['kind']:<10}{step['detail']}".rstrip()
        if choice["omitted_steps"]:
            yield f"    ... and {choice['omitted_steps']:,} more steps"


def _stages(choice: Mapping[str, Any], total_ms: float, ms: Any) -> Iterator[str]:
    yield f"  {'stage':<17}{'from':>9}{'took':>10}{'predicted':>11}  {'':<{BAR}}  where, waited for"
    for stage in choice["stages"]:
        start = round(BAR * min(1.0, stage["began_ms"] / total_ms)) if total_ms else 0
        width = max(1, round(BAR * stage["took_ms"] / total_ms)) if total_ms and stage["took_ms"] else 0
        bar = f"{' ' * min(start, BAR - 1)}{'#' * width}"[:BAR]
        place = ", ".join(filter(None, (stage["where"], stage["waits_for"])))
        times = f"{ms(stage['began_ms']):>9}{ms(stage['took_ms']):>10}{ms(stage['predicted_ms']):>11}"
        yield f"  {stage['name']:<17}{times}  {bar:<{BAR}}  {place}".rstrip()
    extra = [f"{choice['attempts']:,} attempts"] if choice["attempts"] > 1 else []
    extra += [f"{choice['preemptions']:,} preemptions"] if choice["preemptions"] else []
    if extra:
        yield f"  {', '.join(extra)}"


def _goals(choice: Mapping[str, Any], ms: Any) -> Iterator[str]:
    for name, title in GOALS.items():
        goal = choice["goals"][name]
        if goal["measured_ms"] is None and goal["goal_ms"] is None:
            continue
        wanted = "no goal" if goal["goal_ms"] is None else f"goal {ms(goal['goal_ms'])}"
        verdict = {True: ", met", False: ", MISSED", None: ""}[goal["met"]]
        times = f"measured {ms(goal['measured_ms'])}, predicted {ms(goal['predicted_ms'])}"
        yield f"  {title}: {times}, {wanted}{verdict}"


def _decisions(choice: Mapping[str, Any], ms: Any) -> Iterator[str]:
    for decision in choice["decisions"]:
        yield f"decision at {ms(decision['at_ms'])}"
        yield from (f"  {line}" for line in textwrap.wrap(decision["reason"], WIDTH))
        if not decision["candidates"]:
            continue
        heads = "".join(f"{name:>10}" for name in ("cost", *PARTS))
        yield f"  {'candidate':<24}{heads}{'requests':>10}{'cached':>8}"
        for one in decision["candidates"]:
            name = f"{'* ' if one['chosen'] else '  '}{one['worker']} ({_part(one)})"
            times = "".join(f"{ms(one[f'{part}_ms'], unknown='no limit'):>10}" for part in ("cost", *PARTS))
            notes = [] if one["is_measured"] else ["not measured yet"]
            notes += [one["problem"]] if one["problem"] else []
            yield f"  {name:<24}{times}{one['requests']:>10,}{one['cached_tokens']:>8,}  {', '.join(notes)}".rstrip()


def _part(one: Mapping[str, Any]) -> str:
    return "both" if one["role"] == "decode" and one["computes_prompt"] else one["role"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, 1 if the router does not know the request, or 2 for invalid arguments."""
    options = explain_parser().parse_args(argv)
    source = source_of(options, PROG)
    if source is None:
        return 2
    reply = source.get("/explain", {"id": options.id})
    problem, found = reply.problem, {}
    if not problem and reply.status != 200:
        problem = refusal_of(reply)
    elif not problem:
        try:
            found = json.loads(reply.body)
        except ValueError:
            problem = "the router answers HTTP 200 without JSON"
    if problem:
        print(f"{PROG}: {source.url}: {problem}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if options.json else "\n".join(text_of(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
