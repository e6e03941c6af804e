"""The chat page at /: its parts that need no document, one of them over a real router. Needs node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import Unavailable

from . import node

pytestmark = pytest.mark.skipif(node.PROGRAM is None, reason="node is not installed")


async def test_lines_of_a_stream_may_arrive_in_any_pieces() -> None:
    pieces = ['data: {"a":', "1}\n\n: keep-alive\n\ndata:", " [DONE]\r\n", "\ndata: cut"]
    assert await node.values("chat/service", f"(({json.dumps(pieces)}).map(Service.lineReader()))") == [
        [[], ['{"a":1}'], ["[DONE]"], []]
    ]


async def test_errors_keep_the_words_of_the_api() -> None:
    body = json.dumps(
        {"error": {"message": "prompt has 9,120 tokens", "code": "context_length_exceeded", "param": "messages"}}
    )
    found, odd, gone, base = await node.values(
        "chat/service",
        f"(({{title, message, detail, isRetryable, isPassing}}) => [title, message, detail, isRetryable,"
        f" isPassing])(Service.errorOf({body}, 400))",
        "Service.errorOf('no json', 502).message",
        "[['7', 0], ['Thu, 01 Jan 1970 00:00:09 GMT', 5000], ['soon', 0], [null, 0]].map(([text, now]) =>"
        " Service.pauseOf(text, now))",
        "[[503, '5'], [429, '60'], [429, '61'], [503, ''], [500, '5'], [401, '5']].map(([status, after]) =>"
        " Service.errorOf({}, status, after).isPassing)",
    )
    assert found == [
        "The conversation is too long for this model", "prompt has 9,120 tokens",
        "HTTP 400 · context_length_exceeded · field messages", False, False,
    ]  # fmt: skip
    assert odd == "The service did not give a reason."
    assert gone == [7, 4, 0, 0]
    assert base == [True, True, False, False, False, False]


async def test_settings_become_fields_and_empty_ones_are_left_out() -> None:
    values = {"temperature": "0.5", "top-p": "", "max-tokens": "64", "seed": " 7 ", "stop": "END\n\n\\n\\n\na\\\\n"}
    found, none, kept, forbidden = await node.values(
        "chat/settings",
        f"Settings.fields({json.dumps(values)})",
        "[Settings.DEFAULTS, {...Settings.DEFAULTS, 'max-tokens': 'x'}].map(Settings.fields)",
        "((all) => { const setItem = (name, value) => { all[name] = value; };"
        " const storage = { getItem: (name) => all[name] ?? null, setItem };"
        " const kept = new Settings.Kept(() => storage);"
        " kept.set('seed', '3'); return [all, kept.get('seed'), kept.get('temperature')]; })({})",
        "new Settings.Kept(() => { throw new Error('forbidden'); }).get('temperature')",
    )
    assert found == {"temperature": 0.5, "max_tokens": 64, "seed": 7, "stop": ["END", "\n\n", "a\\n"]}
    assert none == [{}, {}]
    assert kept == [{"diptych.seed": "3"}, "3", ""] and forbidden == ""


async def test_system_prompts_become_presets() -> None:
    added, odd = await node.values(
        "chat/settings",
        "[['Be kind.\\nAlways.', 'x'.repeat(90), 'Be kind.\\nNever.'].reduce(Settings.withPreset, [])].map((all) =>"
        " Settings.presets(JSON.stringify(all)))[0]",
        "['', '{', '3', '[null, {\"name\": 3}]'].map(Settings.presets)",
    )
    assert added == [{"name": "x" * 40, "text": "x" * 90}, {"name": "Be kind.", "text": "Be kind.\nNever."}]
    assert odd == [[], [], [], []]


STORE = """(() => {
  const kept = new Map();
  return {
    get length() { return kept.size; }, key: (index) => [...kept.keys()][index], getItem: (name) => kept.get(name),
    setItem: (name, text) => kept.set(name, text), removeItem: (name) => kept.delete(name),
  };
})()"""
TALK = {
    "id": "c1",
    "title": "Hi",
    "changed": 5,
    "turns": [
        {
            "question": "Hi  there,\nyou",
            "shown": 1,
            "answers": [{"text": "first"}, {"text": "second", "model": "tiny"}],
        },
        {"question": "lost", "shown": 0, "answers": [{"text": "", "error": {"title": "No", "message": "no"}}]},
        {"question": "And?", "shown": 0, "answers": [{"text": "So.", "times": {"totalMs": 0}}]},
    ],
}


async def test_conversations_are_kept_and_come_back() -> None:
    found, odd, gone, full = await node.values(
        "chat/conversations",
        f"((store) => {{ const shelf = new Conversations.Shelf(() => store); shelf.save({json.dumps(TALK)});"
        f" shelf.save({{...Conversations.blank('c2'), changed: 9}});"
        " store.setItem('diptych.theme', 'dark'); store.setItem('diptych.chat.x',"
        " '{bad'); store.setItem('diptych.chat.y', '{\"id\": 3}');"
        f" const all = shelf.list(); shelf.remove('c2'); return [all.map((one) => one.id), all[1],"
        f" shelf.list().length]; }})({STORE})",
        "Conversations.read(JSON.stringify({id: 'a', turns: ["
        "null, {question: 3}, {question: 'q', answers: [{}, {text: 't'}], shown: 7}]}))",
        "new Conversations.Shelf(() => { throw new Error('forbidden'); }).list()",
        "new Conversations.Shelf(() => { throw new DOMException('full', 'QuotaExceededError'); })"
        ".save(Conversations.blank('a'))",
    )
    ids, talk, left = found
    assert (ids, left) == (["c2", "c1"], 1)
    assert [turn["question"] for turn in talk["turns"]] == ["Hi  there,\nyou", "lost", "And?"]
    assert talk["turns"][1]["answers"][0]["error"] == {
        "title": "No",
        "message": "no",
        "isRetryable": True,
        "detail": "",
    }
    assert talk["turns"][2]["answers"][0]["note"] == "the page was closed before the answer was complete"
    assert [turn["shown"] for turn in odd["turns"]] == [0] and len(odd["turns"][0]["answers"]) == 1
    assert gone == [] and full == "This browser's storage is full. Delete older conversations."


async def test_the_context_is_what_is_shown_and_exports_read_well() -> None:
    talk = f"Conversations.read({json.dumps(json.dumps(TALK))})"
    messages, exported, name, title = await node.values(
        "chat/conversations",
        f"(({{turns}}) => Conversations.messages({{turns}}, turns[2], 'Be brief.'))({talk})",
        f"Conversations.exported({talk})",
        f"Conversations.fileName({talk})",
        "[...Conversations.titleOf({turns: [{after: '', answers: [], question: '😀'.repeat(90)}]})].length",
    )
    assert messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there,\nyou"},
        {"role": "assistant", "content": "second"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert exported == (
        "# Hi there, you\n\n## Question\n\nHi  there,\nyou\n\n## Answer (tiny)\n\nsecond\n\n## Question\n\nlost\n\n"
        "## Question\n\nAnd?\n\n## Answer\n\nSo.\n"
    )
    assert (name, title) == ("hi-there-you.md", 60)


BRANCHED = """((texts) => {
  const one = Conversations.blank('c1');
  const say = (before, question, text, files = []) => {
    const turn = Conversations.add(one, before, question, files);
    turn.answers.push({ id: `answer to ${question}`, text });
    return turn;
  };
  const first = say(undefined, 'first', 'A'), second = say(first, 'second', 'B'), third = say(second, 'third', 'C');
  const better = say(first, 'better', 'D');
  return { one, first, second, third, better, questions: () => Conversations.path(one).map((turn) => turn.question) };
})()"""


async def test_an_edited_message_is_a_branch_and_the_other_stays() -> None:
    shown, back, fork, again, cycle = await node.values(
        "chat/conversations",
        f"{BRANCHED}.questions()",
        f"((made) => {{ Conversations.show(made.one, made.second); return made.questions(); }})({BRANCHED})",
        f"((made) => Conversations.branches(made.one, made.better).map((one) => one.question))({BRANCHED})",
        f"((made) => {{ const [read] = Conversations.unpacked(Conversations.packed([made.one]));"
        " return [JSON.stringify(read.turns.map(({ id, after }) => [id, after])) ==="
        " JSON.stringify(made.one.turns.map(({ id, after }) => [id, after])),"
        f" Conversations.path(read).map((turn) => turn.question)]; }})({BRANCHED})",
        "Conversations.path(Conversations.read(JSON.stringify({ id: 'a', turns: ["
        "{ id: 'x', after: '', question: 'q' }, { id: 'y', after: 'x', question: 'r' },"
        " { id: 'x', after: 'y', question: 's' }] }))).length",
    )
    assert (shown, back, fork) == (["first", "better"], ["first", "second", "third"], ["second", "better"])
    assert again == [True, ["first", "better"]] and cycle == 3


async def test_a_failed_answer_is_dropped_unless_something_follows() -> None:
    (left,) = await node.values(
        "chat/conversations",
        "((one) => { const first = Conversations.add(one, undefined, 'q', []);"
        " first.answers.push({ id: 'failed', text: '' }); Conversations.add(one, first, 'r', []);"
        " first.answers.push({ id: 'other', text: '' }, { id: 'good', text: 'A' });"
        " Conversations.dropFailed(one, first); return first.answers.map(({ id }) => id);"
        " })(Conversations.blank())",
    )
    assert left == ["failed", "good"]


async def test_search_looks_for_all_words_in_all_branches_and_imports_are_checked() -> None:
    found, odd = await node.values(
        "chat/conversations",
        f"['', 'SECOND c', 'second nothing', 'better'].map((words) => Conversations.matches({BRANCHED}.one, words))",
        '[\'\', \'[]\', \'{"format": "other"}\', \'{"format": "diptych-conversations", "conversations": [null,'
        ' {"id": "a", "turns": []}]}\'].map(Conversations.unpacked)',
    )
    assert found == [True, True, False, True]
    assert odd == [None, None, None, []]


async def test_files_are_text_of_the_message_within_a_limit() -> None:
    read = (
        "((bytes, before = []) => Attachments.read(new File([bytes], 'a.csv'), before).catch((error) => error.message))"
    )
    content, good, large, binary, other = await node.values(
        "chat/attachments",
        "Attachments.content({ question: 'Why?', files: [{ name: 'a.py', text: 'x = \"```\"' },"
        " { name: 'b', text: 'y\\n' }] })",
        f"{read}('a,b\\n')",
        f"{read}('x'.repeat(300000), [{{ text: 'y'.repeat(300000) }}])",
        f"{read}('a\\0b')",
        f"{read}(new Uint8Array([0xff, 0xfe, 0x41]))",
    )
    assert content == 'File a.py:\n````py\nx = "```"\n````\n\nFile b:\n```\ny\n```\n\nWhy?'
    assert good == {"name": "a.csv", "text": "a,b\n", "tokens": 0}
    assert large == "a.csv (293 KiB) is too large: the files of a message may have 512 KiB in total."
    assert binary == other == "a.csv is not a text file in UTF-8."


async def test_the_context_is_counted_then_estimated() -> None:
    usage = {"prompt_tokens": 900, "completion_tokens": 100}
    turns = [
        {"question": "q", "files": [], "answers": [{"text": "a", "times": {"usage": usage}}], "shown": 0},
        {"question": "x" * 40, "files": [], "answers": [{"text": "", "times": None}], "shown": 0},
    ]
    draft = {"question": "y" * 8, "files": [{"text": "z" * 400, "tokens": 0}, {"text": "z", "tokens": 55}]}
    empty = json.dumps({"question": "", "files": []})
    counted, estimated, *shown = await node.values(
        "chat/context",
        f"Context.used({json.dumps(turns[:1])}, {empty})",
        f"Context.used({json.dumps(turns)}, {json.dumps(draft)})",
        *(
            f"Context.shown({{ tokens: 1000, isEstimate: {flag} }}, {most})"
            for flag, most in (("false", 8192), ("true", 1200), ("false", 900), ("true", 0))
        ),
    )
    assert counted == {"tokens": 1000, "isEstimate": False}
    assert estimated == {"tokens": 1000 + 10 + 2 + 100 + 55, "isEstimate": True}
    assert [one["text"] for one in shown] == [
        "1,000 of 8,192 tokens", "≈ 1,000 of 1,200 tokens", "1,000 of 900 tokens", "≈ 1,000 tokens",
    ]  # fmt: skip
    assert [one["state"] for one in shown] == ["", "nearly", "full", ""]


async def test_times_are_of_this_clock_and_tokens_of_the_service() -> None:
    text, thought = "{isText: true, isThought: false", "{isText: false, isThought: true"
    usage = {"completion_tokens": 101, "prompt_tokens": 1200, "prompt_tokens_details": {"cached_tokens": 1024}}
    steps = f"[[80, {thought}}}], [480, {thought}}}], [1080, {text}, usage: {json.dumps(usage)}}}]]"
    made = f"{steps}.reduce((times, [ms, what]) => Timings.later(times, ms, what), Timings.begun())"
    said, alone, thoughts, times = await node.values(
        "chat/timings",
        f"Timings.shown({{...{made}, totalMs: 1100}}).map(({{name, value}}) => name ? `${{name}} ${{value}}` : value)",
        f"Timings.shown([[80, {text}}}], [580, {text}}}]].reduce((times, [ms, what]) => Timings.later(times,"
        f" ms, what), Timings.begun())).map((one) => one.value)",
        f"{made}.thoughtMs",
        "[0.4, 999, 1234, 12345, 61000].map(Timings.time)",
    )
    assert said == ["TTFT 80 ms", "100.0 tokens/s", "101 tokens", "total 1.10 s", "prompt 1,200 (1,024 cached)"]
    assert alone == ["80 ms", "≈ 2.0 tokens/s", "≈ 2 tokens"]
    assert (thoughts, times) == (400, ["0 ms", "999 ms", "1.23 s", "12.3 s", "1 min 1 s"])


async def test_the_list_is_by_day_with_the_newest_first() -> None:
    day = 24 * 3600 * 1000
    all_of = [
        {"id": f"c{at}", "title": "t", "changed": 100 * day + at} for at in (5, -5, -3 * day, 9, -20 * day, -90 * day)
    ]
    nodes = f"Sidebar.nodes({json.dumps(all_of)}, 'c9', new Set(['c5']), {100 * day})"
    spans, ids, current, running = await node.values(
        "chat/sidebar markdown/tree",
        f"{nodes}.map((one) => Tree.textOf(one.children[0]))",
        f"{nodes}.map((one) => one.children[1].children.map((row) => row.attributes['data-id']))",
        f"{nodes}[0].children[1].children.map((row) => row.children[0].attributes['aria-current'] ?? '')",
        f"{nodes}[0].children[1].children.map((row) => Tree.textOf(row.children[0]))",
    )
    assert spans == ["Today", "Yesterday", "Previous 7 days", "Previous 30 days", "Older"]
    assert ids[:2] == [["c9", "c5"], ["c-5"]]
    assert (current, running) == (["true", ""], ["t", "●t"])


DEEDS = """((root) => {
  const found = [];
  const look = (one) => {
    if (one.attributes?.['data-do']) found.push(one.attributes['data-do']);
    one.children?.forEach(look);
  };
  look(root);
  return found;
})"""


@pytest.mark.slow
async def test_what_can_be_done_with_a_turn() -> None:
    error = {"title": "No", "message": "no", "isRetryable": True, "detail": ""}

    def turn(view: dict[str, Any], *answers: dict[str, Any]) -> str:
        blank = {"text": "", "thought": "", "note": "", "times": None, "error": None}
        data = {"question": "q", "answers": [blank | one for one in answers], "shown": 0}
        look = {
            "index": 0,
            "isEditing": False,
            "isLast": True,
            "isBusy": False,
            "branch": 0,
            "numBranches": 1,
            "pauseS": 0,
            "run": None,
        } | view
        return f"Turns.turnNode({json.dumps(data)}, {json.dumps(look)})"

    run = {"waitedMs": 2000, "pauseS": 0}
    views = [
        turn({}, {"text": "a"}), turn({"isLast": False}, {"text": "a"}, {"text": "b"}),
        turn({"isBusy": True, "run": run}, {"text": "a"}),
        turn({}, {"error": error}), turn({"isEditing": True}, {"text": "a"}), turn({"numBranches": 2}, {"text": "a"}),
    ]  # fmt: skip
    found = await node.values("chat/turns", *(f"{DEEDS}({one})" for one in views))
    assert found == [
        ["edit", "copy-question", "copy-answer", "retry"],
        ["edit", "copy-question", "copy-answer", "answer-before", "answer-after"],
        ["copy-question"],
        ["edit", "copy-question", "retry"],
        ["resend", "cancel-edit", "copy-answer", "retry"],
        ["edit", "copy-question", "branch-before", "branch-after", "copy-answer", "retry"],
    ]
    paused = {"pauseS": 4.2, "problem": "Busy.", "tries": 2, "mostTries": 5}
    texts = [
        turn({"run": run}, {}),
        turn({"run": paused}, {}),
        turn({"isEditing": True}, {"text": "a"}),
        turn({"pauseS": 70}, {"error": error}),
    ]
    shown = await node.values("chat/turns markdown/tree", *(f"Tree.textOf({one})" for one in texts))
    assert "waiting for the first token, 2.0 s" in shown[0]
    assert "Busy. Retrying in 5 s (2 of 5)." in shown[1]
    assert "The present version is kept." in shown[2] and "Try again in 70 s" in shown[3]


RUN = """(async (fields, after) => { let changes = 0, run; const answer = Answering.blank('tiny-random');
 const body = Answering.body('tiny-random', [{ role: 'user', content: 'hi' }], fields);
 run = new Answering.Run(answer, body, '', () => { changes++; if (after && changes === after) run.stop(); });
 await run.toEnd(); return { ...answer, changes, tries: run.tries }; })"""


@pytest.mark.slow
async def test_an_answer_comes_to_its_end(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text="Hello there", eos_after=11))
    (answer,) = await node.values("chat/answering", f"{RUN}({{seed: 3, stop: ['zzz']}})", url=running.url)
    assert (answer["text"], answer["note"], answer["error"]) == ("Hello there", "", None)
    assert (
        answer["times"]["usage"]["completion_tokens"] == 12
        and answer["times"]["totalMs"] >= answer["times"]["firstMs"] > 0
    )
    assert running.engine.requests[0].params.seed == 3


@pytest.mark.slow
async def test_an_answer_can_be_stopped_and_the_workers_stop_too(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=6))
    (answer,) = await node.values("chat/answering", f"{RUN}({{}}, 4)", url=running.url)
    assert answer["note"] == "stopped" and "The quick".startswith(answer["text"]) and answer["text"]
    assert answer["times"]["usage"]["completion_tokens"] >= 3, "counted as it came"
    await tools.until(lambda: running.engine.aborted)


@pytest.mark.slow
async def test_a_busy_service_is_asked_again_when_it_says(start: Any, tools: Any) -> None:
    class BusyAtFirst(tools.Engine):  # type: ignore[misc]
        def check_room(self, *arguments: Any) -> None:
            busy, self.full = self.full, None
            if busy is not None:
                raise busy

    busy = Unavailable("4 requests wait, 4 may.", retry_after_s=1.0)
    running = await start(BusyAtFirst(text="Hi", eos_after=2, full=busy))
    (answer,) = await node.values("chat/answering", f"{RUN}({{}})", url=running.url)
    assert (answer["text"], answer["tries"], answer["error"]) == ("Hi", 1, None)
    assert answer["times"]["totalMs"] < 1000, "the pause is no part of the answer"


@pytest.mark.slow
async def test_a_pause_can_be_stopped(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(full=Unavailable("4 requests wait, 4 may.", retry_after_s=50.0)))
    (answer,) = await node.values("chat/answering", f"{RUN}({{}}, 1)", url=running.url)
    assert (answer["note"], answer["error"], answer["changes"]) == ("stopped", None, 1)


@pytest.mark.slow
async def test_a_pause_of_minutes_is_left_to_the_reader(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(full=Unavailable("4 requests wait, 4 may.", retry_after_s=300.0)))
    (answer,) = await node.values("chat/answering", f"{RUN}({{}})", url=running.url)
    assert answer["error"]["message"] == "4 requests wait, 4 may." and answer["error"]["isRetryable"]
    assert answer["error"]["retryAt"] > 0 and answer["tries"] == 0


@pytest.mark.slow
async def test_a_refusal_is_told_in_the_words_of_the_api(start: Any) -> None:
    running = await start()
    (answer,) = await node.values("chat/answering", f"{RUN}({{temperature: 9}})", url=running.url)
    assert answer["error"]["title"] == "The request was rejected" and not answer["error"]["isRetryable"]
    assert answer["error"]["message"].startswith("temperature") and answer["tries"] == 0
