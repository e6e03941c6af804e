"""Recorded decode steps: on a GPU as CUDA graphs, in the interpreter as functions over the same static memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from common.engine.adapters.bank import AdapterBank
from common.engine.adapters.slots import AdapterSlots
from common.engine.kv.cache import KVCache
from common.engine.models.batch import ROW_BEFORE, SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.recorded_steps import GraphRecorder, PlainRecorder
from common.engine.run.runner import ModelRunner
from common.engine.run.seats import FROM_HOST
from common.engine.run.step_launchers import GraphStep, StepLauncher
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.errors import BlockError, ContextLengthExceeded, InvalidRequest
from common.model_files.tiny import make_tiny_model
from common.wire.sampling_params import SampledToken, SamplingParams
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend
from kernels.gpu.device_plan import GPUPlan

from ...adapters import make_adapter
from ...common.engine.models.generation import files_of, prompt
from ...draft_heads import eagle_folder
from ...eagle3_heads import eagle3_folder
from ...oracle import generate
from .conftest import ON_GPU

pytestmark = [pytest.mark.gpu] if ON_GPU else [pytest.mark.interpret]
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZE, NUM_BLOCKS, MAX_SEQS = 16, 12, 4
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOUND, "cpu", triton_backend)


@pytest.fixture(autouse=True)
def seats_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each launched step the device must have in its seats what the host thinks."""
    launch = GraphRunner.launch

    def checked(runner: GraphRunner, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> torch.Tensor:
        logits = launch(runner, chunks, sources)
        runner.check_integrity()
        return logits

    monkeypatch.setattr(GraphRunner, "launch", checked)


class CountingRecorder:
    """Counts the replays of what it records."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._recorder = GraphRecorder(DEVICE) if ON_GPU else PlainRecorder()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = self._recorder.record(run)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    """Gemma, whose layers see the past through windows of two sizes: a plan has work lists for both."""
    folder = make_tiny_model(tmp_path / "model", architecture="gemma3")
    return load_model(files_of(folder), device=str(DEVICE))


@pytest.fixture
def runner(model: Decoder) -> Iterator[GraphRunner]:
    kv = KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE)
    kv.tensor.fill_(float("nan"))  # nothing may be read that was not written
    recorder = GraphRecorder(DEVICE) if ON_GPU else PlainRecorder()
    yield GraphRunner(model, kv, recorder, max_num_seqs=MAX_SEQS, max_model_len=64)


def launch(launcher: StepLauncher, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> GraphStep:
    step = launcher.launch(chunks, sources)
    step.sample({})
    return step


def ids(step: GraphStep) -> list[int]:
    return [token.token_id for token in step.read()]


@pytest.mark.slow
def test_steps_fed_by_each_other_give_the_oracles_tokens(runner: GraphRunner, model: Decoder) -> None:
    """Three sequences in a step of four, one of which crosses into its next block; the host is told no token."""
    prompts = [prompt(count, seed=count) for count in (3, 15, 20)]
    tables = [(0, 1), (5, 7), (9, 3)]
    sampler, row = Sampler(model.config.vocab_size), SamplingRow(GREEDY, 0)
    launcher = StepLauncher(runner, sampler)
    chunks = [SequenceChunk(tokens, 0, table) for tokens, table in zip(prompts, tables, strict=True)]
    assert not runner.replays(chunks)
    first = [token.token_id for token in sampler.sample(runner.forward(chunks), [row] * 3)]
    found, sources, flights = [[token] for token in first], [FROM_HOST] * 3, []
    for step in range(2):
        chunks = [SequenceChunk((first[i] if step == 0 else 0,), len(prompts[i]) + step, tables[i]) for i in range(3)]
        assert launcher.takes(chunks)
        flights.append(launch(launcher, chunks, sources))
        sources = [0, 1, 2]
    for flight in flights:
        for tokens, token_id in zip(found, ids(flight), strict=True):
            tokens.append(token_id)
    if not ON_GPU:
        assert found == [generate(model, tokens, GREEDY) for tokens in prompts]
    assert runner.profile.num_tokens == 3
    untouched = [block for block in range(NUM_BLOCKS) if block not in {0, 5, 7, 9, 3}]
    assert runner.kv.tensor[untouched].isnan().all()


@pytest.mark.slow
def test_rows_of_one_sequence_are_those_of_steps_of_its_own(runner: GraphRunner, model: Decoder) -> None:
    """A step that checks draft tokens: right ones, a wrong one, and one behind it that crosses into the next block."""
    tokens = prompt(14, seed=13)
    launcher = StepLauncher(runner, Sampler(model.config.vocab_size))
    plain = ModelRunner(model, runner.kv)
    plain.forward([SequenceChunk(tokens[:-1], 0, (5, 7))])
    found = []
    for place in range(3):
        chunk = SequenceChunk((tokens[13] if not found else found[-1],), 13 + place, (5, 7))
        found += ids(launch(launcher, [chunk], [FROM_HOST]))
    runner.kv.tensor[7] = float("nan")
    drafts = [tokens[13], found[0], (found[1] + 1) % 250, 9]
    chunks = [SequenceChunk((token,), 13 + place, (5, 7)) for place, token in enumerate(drafts)]
    assert ids(launch(launcher, chunks, [FROM_HOST] * 4))[:2] == found[:2]
    last = [SequenceChunk((found[1],), 15, (5, 7))]
    assert ids(launch(launcher, last, [FROM_HOST])) == found[2:]


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.4, "presence_penalty": 0.6},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(5, 90, 3))},
    {"temperature": 1.0, "seed": 9, "top_p": 0.7},
]


@pytest.mark.slow
def test_a_mixed_batch_replays_what_was_recorded(model: Decoder) -> None:
    """Log-probabilities, penalties and a mask beside a plain row: the model's part of each step is the recording."""
    kv = KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE)
    recorder = CountingRecorder()
    runner = GraphRunner(model, kv, recorder, max_num_seqs=MAX_SEQS, max_model_len=64)
    params = [SamplingParams(max_tokens=5, ignore_eos=True, **kind) for kind in KINDS]  # type: ignore[arg-type]
    prompts, tables = [prompt(5 + i, seed=i) for i in range(4)], [(i, 4 + i) for i in range(4)]
    launcher = StepLauncher(runner, Sampler(model.config.vocab_size))
    ModelRunner(model, kv).forward([SequenceChunk(tokens[:-1], 0, tables[i]) for i, tokens in enumerate(prompts)])
    found: list[list[SampledToken]] = [[] for _ in prompts]
    recorder.num_replays = 0
    step: GraphStep | None = None
    for number in range(5):
        places = [len(prompts[i]) - 1 + number for i in range(4)]
        tokens_of = [(0,) if number else (prompts[i][-1],) for i in range(4)]
        chunks = [SequenceChunk(tokens_of[i], places[i], tables[i], params=params[i]) for i in range(4)]
        assert launcher.takes(chunks)
        launched = launcher.launch(chunks, [FROM_HOST] * 4 if step is None else range(4))
        if step is not None:
            for tokens, token in zip(found, step.read(), strict=True):
                tokens.append(token)
        launched.sample(
            {
                i: SamplingRow(params[i], places[i] + 1, [token.token_id for token in found[i]], prompts[i])
                for i in range(3)  # the last one needs no more than its parameters
            }
        )
        step = launched
    assert step is not None and recorder.num_replays == 5
    for tokens, token in zip(found, step.read(), strict=True):
        tokens.append(token)
    if not ON_GPU:
        for i in range(4):
            assert [token.token_id for token in found[i]] == generate(model, prompts[i], params[i])
    assert all(token.logprobs and len(token.logprobs.top) == 3 for token in found[0])
    assert all(token.logprobs is None for tokens in found[1:] for token in tokens)


DRAWS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": -5, "min_p": 0.05},
    {"temperature": 1.3, "seed": 2**62, "top_k": 9, "top_p": 0.8},
]


@pytest.mark.slow
def test_rows_that_need_nothing_else_are_sampled_by_the_recording(model: Decoder) -> None:
    """Two replays a step, and the tokens that the host's sampler draws from the same logits."""
    kv, recorder = KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE), CountingRecorder()
    runner = GraphRunner(model, kv, recorder, max_num_seqs=MAX_SEQS, max_model_len=64)
    params = [SamplingParams(max_tokens=5, ignore_eos=True, **draw) for draw in DRAWS]  # type: ignore[arg-type]
    prompts, tables = [prompt(5 + i, seed=i) for i in range(3)], [[i, 4 + i] for i in range(3)]
    sampler = Sampler(model.config.vocab_size)
    launcher = StepLauncher(runner, sampler)
    ModelRunner(model, kv).forward([SequenceChunk(tokens[:-1], 0, tables[i]) for i, tokens in enumerate(prompts)])
    recorder.num_replays = 0
    for step in range(3):
        starts = [len(tokens) - 1 + step for tokens in prompts]
        chunks = [SequenceChunk((prompts[i][-1],), starts[i], tables[i], params=params[i]) for i in range(3)]
        launched = launch(launcher, chunks, range(3) if step else [FROM_HOST] * 3)
        expected = sampler.sample(runner.logits[:3], [SamplingRow(params[i], starts[i] + 1) for i in range(3)])
        assert launched.read() == expected
    assert recorder.num_replays == 2 * 3


@pytest.mark.slow
def test_a_sequence_that_leaves_and_blocks_that_go_to_another(runner: GraphRunner, model: Decoder) -> None:
    """Rows move up, a block of the one that left is another's at once; logits are those of steps filled anew."""
    prompts, tables = [prompt(14 + i, seed=i) for i in range(3)], [[0, 1], [2, 3], [4, 5]]
    plain = ModelRunner(model, runner.kv)
    plain.forward([SequenceChunk(tokens, 0, tables[i]) for i, tokens in enumerate(prompts)])

    def both(chunks: Sequence[SequenceChunk], sources: Sequence[int], tokens: Sequence[int]) -> None:
        given = [chunk._replace(token_ids=(token,)) for chunk, token in zip(chunks, tokens, strict=True)]
        expected = plain.forward(given).clone()
        torch.testing.assert_close(runner.launch(chunks, sources), expected)
        with torch.inference_mode():
            runner.sampled[: len(chunks)] = torch.arange(len(chunks), device=DEVICE) + 40

    both([SequenceChunk((7 + i,), 14 + i, tables[i]) for i in range(3)], [FROM_HOST] * 3, (7, 8, 9))
    runner.kv.tensor[2:4] = float("nan")  # sequence 1 has left, and its blocks hold nothing
    tables[2].append(3)
    both([SequenceChunk((0,), 15 + i, tables[i]) for i in (0, 2)], [0, 2], (40, 42))
    newcomer = SequenceChunk((11,), 0, [2])
    moved = [SequenceChunk((0,), 18, tables[2]), newcomer, SequenceChunk((0,), 16, [0, 1])]
    both(moved, [1, FROM_HOST, 0], (41, 11, 40))


@pytest.mark.slow
def test_rows_beside_prompts_are_replayed(runner: GraphRunner, model: Decoder) -> None:
    """Whatever the order of the chunks; the rows' logits are those of the recording, bit for bit."""
    plain = ModelRunner(model, runner.kv)
    plain.forward([SequenceChunk(prompt(9, seed=i), 0, (i,)) for i in range(2)])
    rows = [SequenceChunk((7 + i,), 9, (i,)) for i in range(2)]
    alone = runner.forward(rows).clone()
    long = SequenceChunk(prompt(20, seed=5), 0, (4, 5))
    whole = SequenceChunk(prompt(6, seed=6), 0, (6,), all_logits=True)
    silent = SequenceChunk(prompt(4, seed=7), 0, (7,), sample=False)
    expected = plain.forward([long, whole, silent]).clone()
    for chunks, order in (
        ([*rows, long, whole, silent], [0, 1, 2, *range(3, 9)]),
        ([long, rows[0], whole, silent, rows[1]], [2, 0, *range(3, 9), 1]),
    ):
        found = runner.forward(chunks)
        both = torch.cat((alone, expected))[order]
        assert found.shape == both.shape
        torch.testing.assert_close(found, both)
        assert torch.equal(found[[order.index(0), order.index(1)]], alone)
        assert runner.profile.num_tokens == 32 and runner.profile.num_sequences == 5


@pytest.mark.slow
def test_a_bad_prompt_beside_rows_is_refused_before_anything_runs(runner: GraphRunner) -> None:
    runner.kv.tensor.zero_()
    with pytest.raises(BlockError):
        runner.forward([SequenceChunk((1,), 3, (0, 1)), SequenceChunk((1, 2), 0, (NUM_BLOCKS,))])
    with pytest.raises(BlockError):
        runner.forward([SequenceChunk((1,), 3, (NUM_BLOCKS,)), SequenceChunk((1, 2), 0, (2,))])
    assert not runner.kv.tensor.any()


@pytest.mark.slow
def test_a_cache_of_8_bits(model: Decoder) -> None:
    kv = KVCache(model.config, NUM_BLOCKS, SIZE, "fp8", DEVICE)
    kv.tensor.view(torch.uint8).fill_(0x7F)  # no number
    recorder = GraphRecorder(DEVICE) if ON_GPU else PlainRecorder()
    runner, plain = GraphRunner(model, kv, recorder, max_num_seqs=2, max_model_len=64), ModelRunner(model, kv)
    plain.forward([SequenceChunk(prompt(10), 0, (2, 4))])
    chunks = [SequenceChunk((7,), 10, (2, 4))]
    expected = plain.forward(chunks).clone()
    assert expected.isfinite().all()
    for _ in range(2):
        torch.testing.assert_close(runner.forward(chunks), expected)


@pytest.mark.slow
def test_forward_replays_what_was_recorded(runner: GraphRunner, model: Decoder) -> None:
    plain = ModelRunner(model, runner.kv)
    plain.forward([SequenceChunk(prompt(10), 0, (2, 4))])
    chunks = [SequenceChunk((7,), 10, (2, 4))]
    expected = plain.forward(chunks).clone()
    for _ in range(2):  # the same step again: the same numbers over the same cells
        torch.testing.assert_close(runner.forward(chunks), expected)


@pytest.mark.slow
def test_a_row_whose_logits_are_no_numbers_feeds_a_token_all_the_same(runner: GraphRunner, model: Decoder) -> None:
    """Its id is no token; the step that is launched before the host has seen it must stay inside of the weights."""
    plain = ModelRunner(model, runner.kv)
    plain.forward([SequenceChunk(prompt(11), 0, (2, 4))])
    expected = plain.forward([SequenceChunk((model.config.vocab_size - 1,), 11, (2, 4))]).clone()
    runner.launch([SequenceChunk((prompt(11)[10],), 10, (2, 4))], [FROM_HOST])
    with torch.inference_mode():
        runner.sampled[0] = 2**31 - 1
    logits = runner.launch([SequenceChunk((0,), 11, (2, 4))], [0])
    torch.testing.assert_close(logits, expected)


@pytest.mark.slow
def test_a_device_that_has_failed_is_not_waited_for(
    runner: GraphRunner, model: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine closes its launcher before the threads that move blocks: those must be ended too."""

    def wait() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore words")

    monkeypatch.setattr(runner, "wait", wait)
    StepLauncher(runner, Sampler(model.config.vocab_size)).close()
    assert "failed: CUDA error: an illegal memory access was encountered" in caplog.text


def test_only_recorded_steps_are_replayed(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SequenceChunk((1,), 5, (2, 4))
    assert runner.max_num_seqs == MAX_SEQS
    assert runner.replays([one] * MAX_SEQS)
    assert not runner.replays([one] * (MAX_SEQS + 1))
    assert not runner.replays([])
    assert not runner.replays([one, SequenceChunk((1, 2), 5, (2, 4))])
    assert not runner.replays([one, SequenceChunk((1,), 5, (2, 4), sample=False)])
    assert not runner.replays([SequenceChunk((1,), 64, range(5))])
    monkeypatch.setattr(GPUPlan, "takes", lambda plan, lengths: list(lengths) != [6])
    assert not runner.replays([one]) and runner.replays([one] * 2)  # room for partial results is by tokens


@pytest.mark.slow
def test_bad_chunks_are_refused_before_anything_runs(runner: GraphRunner, model: Decoder) -> None:
    runner.kv.tensor.zero_()
    good = SequenceChunk((1,), 3, (0, 1))
    for bad, error in (
        (SequenceChunk((1,), 16, (2,)), BlockError),
        (SequenceChunk((1,), 3, (NUM_BLOCKS,)), BlockError),
        (SequenceChunk((model.config.vocab_size,), 3, (2,)), InvalidRequest),
        (SequenceChunk((1,), model.config.max_model_len, range(NUM_BLOCKS)), ContextLengthExceeded),
    ):
        with pytest.raises(error):
            runner.launch([good, bad], [FROM_HOST] * 2)
    with pytest.raises(InvalidRequest, match="5 sequences exceed the largest recorded step of 4"):
        runner.launch([good] * 5, [FROM_HOST] * 5)
    assert not runner.kv.tensor.any()


@pytest.mark.slow
@pytest.mark.parametrize("make_head", [eagle_folder, eagle3_folder])
def test_hidden_states_go_from_step_to_step(tmp_path: Path, make_head: Callable[..., Path]) -> None:
    """Rows of following steps, and of draft tokens in one, write the head's KV that steps without recordings write."""
    served = make_tiny_model(tmp_path / "model")
    head, tokens, table = make_head(tmp_path / "head", served), prompt(14, seed=13), (5, 7)
    rows = [SequenceChunk((9,), 14, table, before=2, kept=0)]
    rows += [SequenceChunk((10 + i,), 15 + i, table, before=ROW_BEFORE, kept=3 + i) for i in range(2)]
    found = []
    for is_recorded in (True, False):
        model = load_drafting_model(files_of(served), str(head), num_places=6, device=str(DEVICE))
        kv = KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE)
        recorder, runner = CountingRecorder(), ModelRunner(model, kv)
        if is_recorded:
            runner = GraphRunner(model, kv, recorder, max_num_seqs=MAX_SEQS, max_model_len=64)
        before = recorder.num_replays
        runner.forward([SequenceChunk(tokens[:-1], 0, table, kept=2)])
        runner.forward([SequenceChunk(tokens[-1:], 13, table, before=2, kept=2)])
        runner.forward(rows)
        runner.forward([SequenceChunk((11,), 16, table, before=3, kept=1)])
        assert recorder.num_replays - before == (3 if is_recorded else 0)
        found.append((kv.tensor[list(table), -1], model._states[:6]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.count_nonzero() > ours.numel() // 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recorded_step_serves_rows_with_and_without_adapters(model: Decoder, tmp_path: Path) -> None:
    """The recording holds no adapter: which one a row uses is an input, and what a place holds may change."""
    base = tmp_path / "model"
    kv = KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE)
    bank = AdapterBank(AdapterSlots(model, max_loras=2, max_rank=16))
    recorder = GraphRecorder(DEVICE) if ON_GPU else PlainRecorder()
    runner = GraphRunner(model, kv, recorder, max_num_seqs=MAX_SEQS, max_model_len=64, adapts=True)
    places = [bank.load(str(seed), str(make_adapter(tmp_path / str(seed), base, seed=seed))).place for seed in (1, 2)]
    plain = ModelRunner(model, KVCache(model.config, NUM_BLOCKS, SIZE, "float32", DEVICE))
    for adapters in ((-1, *places), (places[1], -1, places[1]), (-1, -1, -1)):
        prompts = [SequenceChunk(prompt(9, seed=i), 0, (i,), adapter=one) for i, one in enumerate(adapters)]
        steps = [SequenceChunk((7 + i,), 9, (i,), adapter=one) for i, one in enumerate(adapters)]
        for each in (runner, plain):
            each.forward(prompts)
        assert runner.replays(steps)
        torch.testing.assert_close(runner.forward(steps), plain.forward(steps), rtol=1e-4, atol=1e-4)
