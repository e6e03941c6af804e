"""Bookings that grow with their answers, and what is predicted of a worker's blocks."""

from hypothesis import given
from hypothesis import strategies as st

from common.latency.step_model import StepModel, StepShape
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.growth import BookingResizer, num_more_blocks
from router.dispatch.request_state import Assignment, RequestState
from router.fleet.booking import Booking, peak_growth
from router.fleet.registry import WorkerRegistry
from router.policy.forecast import forecast_decode, forecast_inputs, num_lacking_blocks
from router.policy.output_lengths import OutputLengths
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy

from ...fake_worker import heartbeat_of, hello_of

D, E = "tcp://d:1", "tcp://e:1"
MODEL = StepModel(fixed_s=0.01, token_s=1e-4, row_s=1e-4, num_steps=500)
NO_PROMPT = StepShape()


def registry_of(*addresses: str, num_blocks: int = 100, num_running: int = 0) -> WorkerRegistry:
    registry = WorkerRegistry([], addresses, worker_timeout_s=2.0)
    for address in addresses:
        layout = {"block_size": 16, "num_blocks": num_blocks, "max_num_seqs": 64, "max_model_len": 4096}
        registry.on_hello(address, hello_of(address, "decode", **layout), 0.0)
        registry.on_heartbeat(address, beat(num_blocks, num_running=num_running), 0.0)
    return registry


def beat(num_free: int, step: int = 1, serial: int = 0, num_running: int = 0):
    load = {"num_free_blocks": num_free, "num_running": num_running}
    return heartbeat_of(D, step=step, serial=serial, step_model=MODEL, **load)


def book(registry, address=D, *, num_tokens=160, num_more=0):
    num_blocks = registry.workers[address].num_blocks_of(num_tokens)
    more = {"num_tokens": num_tokens, "num_more": num_more}
    return registry.book(address, 0.0, prompt=NO_PROMPT, num_blocks=num_blocks, **more)


sizes = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


@given(sizes)
def test_the_peak_is_that_of_sequences_that_grow_side_by_side(found):
    """The oracle lets each grow by a block a turn and end once it has grown as predicted."""
    peak = 0
    for turn in range(21):
        taken = sum(held + turn for held, more in found if more >= turn)
        peak = max(peak, taken - sum(held for held, _ in found))
    bookings = [Booking(number, D, NO_PROMPT, held, num_more=more) for number, (held, more) in enumerate(found)]
    assert peak_growth(bookings) == peak


def test_the_peak_is_less_than_the_sum_where_short_answers_end_before_long_ones():
    short, long = (Booking(number, D, NO_PROMPT, 20, num_more=more) for number, more in ((1, 5), (2, 20)))
    assert peak_growth([short, long]) == 10


def test_an_answer_ends_at_the_longest_sequence():
    worker = registry_of(D).workers[D]
    assert num_more_blocks(worker, 160, 33) == 3
    assert num_more_blocks(worker, 1590, 300) == 0, "100 blocks of 16 tokens are all there are"


def test_blocks_that_running_answers_will_take_are_not_spare():
    registry = registry_of(D)
    booking = book(registry, num_more=30)
    worker = registry.workers[D]
    assert (worker.load.num_available_blocks, worker.load.num_spare_blocks) == (90, 60)
    registry.on_heartbeat(D, beat(90, step=2, serial=booking.serial), 0.1)
    registry.resize(D, {booking.serial: (12, 18)})
    registry.on_heartbeat(D, beat(78, step=3, serial=booking.serial), 0.2)
    assert (worker.load.num_available_blocks, worker.load.num_spare_blocks) == (78, 60), "it grew as was predicted"
    registry.release(booking)
    assert worker.load.num_spare_blocks == 100


def test_a_resize_of_a_booking_that_has_ended_changes_nothing():
    registry = registry_of(D)
    booking = book(registry, num_more=30)
    registry.release(booking)
    registry.resize(D, {booking.serial: (5, 5)})
    assert registry.workers[D].load.num_spare_blocks == 100


steps = st.lists(st.tuples(st.sampled_from(["book", "resize", "computed", "release", "beat"]), st.integers(0, 9)))


@given(steps)
def test_blocks_of_bookings_are_conserved(actions):
    """Sums follow the single bookings, and go back to zero, in whatever order bookings change."""
    registry = registry_of(D)
    worker, bookings, step = registry.workers[D], [], 1
    for action, number in actions:
        if action == "book":
            bookings.append(book(registry, num_more=number))
        elif action == "beat":
            step += 1
            serial = bookings[number % len(bookings)].serial if bookings else 0
            registry.on_heartbeat(D, beat(100, step, serial), 0.1)
        elif bookings and action == "resize":
            registry.resize(D, {one.serial: (number, 9 - number) for one in bookings[number % len(bookings) :]})
        elif bookings and action == "computed":
            registry.computed(bookings[number % len(bookings)], 0.0)
        elif bookings:
            registry.release(bookings.pop(number % len(bookings)))
        known = worker.bookings.by_serial.values()
        assert worker.bookings.total.num_blocks == sum(one.num_held for one in known)
        assert worker.bookings.total.num_more == sum(one.num_more for one in known)
        assert worker.bookings.fresh.num_blocks == sum(one.num_held for one in known if worker.bookings.is_fresh(one))
    for booking in bookings:
        registry.release(booking)
    assert (worker.bookings.total.num_requests, worker.bookings.total.num_blocks, worker.bookings.total.num_more) == (
        0,
        0,
        0,
    )


def test_a_worker_whose_answers_will_fill_it_is_avoided_although_it_has_room_now():
    registry = registry_of(D, E)
    book(registry, D, num_tokens=160, num_more=85)
    for num_tokens in (640, 160):
        book(registry, E, num_tokens=num_tokens)
    shape = RequestShape(160, 200, {}, num_expected=100)
    decode = registry.ready("decode")
    assert registry.workers[D].load.num_available_blocks > registry.workers[E].load.num_available_blocks
    choice = RoutingPolicy().choose([], decode, shape, 0.0)
    assert choice is not None and choice.decode is registry.workers[E]


def test_an_answer_that_finds_no_room_stalls_itself_and_delays_the_others():
    registry, shape = registry_of(D, E, num_running=1), RequestShape(160, 200, {}, num_expected=160)
    book(registry, D, num_tokens=800, num_more=45)
    book(registry, E, num_tokens=800, num_more=20)
    full, other = (forecast_decode(registry.workers[address], shape) for address in (D, E))
    assert full.stall_s > 0 and full.token_s > other.token_s and full.delay_s > other.delay_s
    assert other.stall_s == 0


def test_all_answers_have_their_turn_however_many_they_are(monkeypatch):
    monkeypatch.setattr("router.dispatch.growth.MOST_A_TICK", 3)
    registry = registry_of(D, num_blocks=10_000)
    states = []
    for number in range(10):
        request = GenerationRequest(f"r{number}", [1] * 16, SamplingParams(max_tokens=400), deadline_s=60.0)
        state = RequestState(request, 0.0)
        state.assign(Assignment("decode", D, D, 1, 1, book(registry, num_tokens=16), 1, 0), 0.0)
        state.stream.token_ids.extend([2] * 160)
        states.append(state)
    growth, worker = BookingResizer(registry, OutputLengths()), registry.workers[D]
    grown = []
    for _ in range(4):
        growth.tick(states)
        grown.append(sum(booking.num_grown == 10 for booking in worker.bookings.by_serial.values()))
    assert grown == [3, 6, 9, 10]
    for state in states[:5]:
        state.done = True
    growth.tick(states[5:])
    assert sum(booking.num_grown for booking in worker.bookings.by_serial.values()) == 100


def test_a_window_bounds_what_a_sequence_is_booked_with():
    """A window of 40 tokens lies in 4 blocks at most; on a prefill worker the tokens of a step count besides."""
    registry = WorkerRegistry([], [D, E], worker_timeout_s=2.0)
    layout = {"block_size": 16, "num_blocks": 100, "max_num_seqs": 64, "max_model_len": 4096, "window": 40}
    registry.on_hello(D, hello_of(D, "decode", **layout), 0.0)
    registry.on_hello(E, hello_of(E, "prefill", max_step_tokens=64, **layout), 0.0)
    decode, prefill = registry.workers[D], registry.workers[E]
    assert [decode.num_blocks_of(count) for count in (10, 33, 1000)] == [1, 3, 4]
    assert [prefill.num_blocks_of(count) for count in (10, 33, 1000)] == [1, 3, 8]
    assert num_more_blocks(decode, 40, 1000) == 1 and num_more_blocks(decode, 64, 1000) == 0
    assert decode.max_tokens == prefill.max_tokens == 4096
    registry.on_hello(D, hello_of(D, "decode", **layout | {"num_blocks": 5}, epoch=2), 0.0)
    assert registry.workers[D].max_tokens == 80  # too few for a window that moves


def test_a_window_bounds_the_blocks_that_a_forecast_finds_lacking():
    """Of 30 free blocks a sequence of 1,000 tokens lacks 33, or none where it takes 4."""
    lacks = []
    for window in (0, 40):
        registry = registry_of(D, num_blocks=100)
        layout = {"block_size": 16, "num_blocks": 100, "max_num_seqs": 64, "max_model_len": 4096}
        registry.on_hello(D, hello_of(D, "decode", window=window, epoch=2, **layout), 0.0)
        registry.on_heartbeat(D, heartbeat_of(D, epoch=2, step=1, num_free_blocks=30, step_model=MODEL), 0.0)
        lacks.append(num_lacking_blocks(forecast_inputs(registry.workers[D]), 1000))
    assert lacks == [33, 0]
