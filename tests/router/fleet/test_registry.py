import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.latency.step_model import StepShape
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import MAX_SUSPECT_S, WorkerState

from ...fake_worker import heartbeat_of, hello_of

P, D = "tcp://p:1", "tcp://d:1"


def hello(role="decode", epoch=1, **fields):
    layout = {"block_size": 16, "num_blocks": 100, "max_model_len": 512, "max_num_seqs": 8}
    return hello_of(f"{role}-1", role, epoch=epoch, **(layout | fields))


def beat(epoch=1, step=1, **fields):
    return heartbeat_of(epoch=epoch, step=step, **({"num_free_blocks": 100} | fields))


@pytest.fixture
def registry():
    return WorkerRegistry([P], [D], worker_timeout_s=2.0)


@pytest.fixture
def alive(registry):
    registry.on_hello(D, hello(), 0.0)
    registry.on_heartbeat(D, beat(), 0.0)
    return registry


def test_a_worker_is_ready_only_when_it_says_so(registry):
    registry.on_hello(D, hello(), 0.0)
    assert registry.workers[D].state is WorkerState.CONNECTED
    registry.on_heartbeat(D, beat(ready=False), 0.0)
    assert registry.ready("decode") == []
    registry.on_heartbeat(D, beat(), 0.0)
    assert [worker.address for worker in registry.ready("decode")] == [D]


def test_a_draining_worker_is_not_ready(alive):
    alive.on_heartbeat(D, beat(draining=True), 0.1)
    assert alive.workers[D].state is WorkerState.DRAINING


def test_a_heartbeat_without_hello_asks_for_one(registry):
    registry.on_heartbeat(D, beat(), 0.0)
    assert registry.needs_hello(D)
    assert registry.ready("decode") == []


def test_silence_kills_and_speech_revives(alive):
    assert [alive.sweep(now) for now in (0.0, 0.9, 1.8)] == [[], [], []]
    assert [worker.address for worker in alive.sweep(2.1)] == [D]
    assert alive.sweep(2.5) == []
    assert alive.needs_hello(D)
    alive.on_heartbeat(D, beat(step=2), 3.0)
    assert alive.workers[D].ready


def test_silence_of_a_worker_whose_frames_are_dropped_says_so(alive):
    alive.on_unreadable(D, "Expected `float` <= 1000000.0")
    assert [alive.sweep(now) for now in (0.0, 0.9, 1.8)] == [[], [], []]
    (dead,) = alive.sweep(2.1)
    assert dead.reason == ("silent for more than 2 s, because its messages are invalid: Expected `float` <= 1000000.0")
    alive.on_heartbeat(D, beat(step=2), 3.0)
    assert alive.workers[D].ready and alive.workers[D].life.unreadable == ""


def test_a_router_that_was_held_up_blames_nobody(alive):
    alive.sweep(0.0)
    assert alive.sweep(60.0) == []
    assert alive.workers[D].ready


def test_a_router_that_is_held_up_again_and_again_still_notices_silence(alive):
    swept = [[worker.address for worker in alive.sweep(1.5 * turn)] for turn in range(9)]
    assert swept[:6] == [[]] * 6 and [D] in swept[6:]


def test_a_router_that_is_held_up_again_and_again_loses_nobody_who_speaks(alive):
    for turn in range(1, 12):
        alive.on_heartbeat(D, beat(step=turn), 5.0 * turn - 0.1)
        assert alive.sweep(5.0 * turn) == []
    assert alive.workers[D].ready


def test_a_router_that_is_held_up_again_and_again_still_notices_a_stuck_engine(alive):
    ended = []
    for turn in range(1, 200):
        ended.append(alive.on_heartbeat(D, beat(step=1), 1.5 * turn - 0.1))
        ended.append(bool(alive.sweep(1.5 * turn)))
    assert sum(ended) == 1
    assert not alive.workers[D].ready


def test_a_stuck_engine_dies_although_it_beats(alive):
    stuck = beat(step=2, num_running=1, turn_limit_s=5.0)
    lost = [alive.on_heartbeat(D, stuck, now) for now in (1.0, 3.0, 5.9, 6.1, 7.0)]
    assert lost == [False, False, False, True, False]
    alive.on_hello(D, hello(), 7.1)
    assert alive.workers[D].state is WorkerState.DEAD
    alive.on_heartbeat(D, beat(step=3, num_running=1), 7.2)
    assert alive.workers[D].ready


def test_an_idle_engine_that_stands_still_dies_too(alive):
    """Its loop turns without work; one that hangs in the first step after a pause looks idle."""
    lost = [alive.on_heartbeat(D, beat(step=1, turn_limit_s=3.0), now) for now in (1.0, 2.0, 3.1)]
    assert lost == [False, False, True]


def test_a_worker_that_loads_its_model_may_stand_still(registry):
    registry.on_hello(D, hello(), 0.0)
    for now in range(20):
        assert not registry.on_heartbeat(D, beat(step=0, ready=False, turn_limit_s=3.0), float(now))
    registry.on_heartbeat(D, beat(step=0, turn_limit_s=3.0), 20.0)
    assert registry.workers[D].ready


def test_a_long_turn_gets_the_time_that_its_worker_says(alive):
    """The limit of the present turn counts, not that of the idle one before it."""
    lost = [alive.on_heartbeat(D, beat(step=2, turn_limit_s=3.0), 1.0)]
    lost += [alive.on_heartbeat(D, beat(step=2, turn_limit_s=30.0), now) for now in (2.0, 15.0, 30.9)]
    assert lost == [False] * 4


def test_a_new_epoch_ends_the_old_life(alive):
    alive.book(D, 0.0, prompt=StepShape.of_prompt(0, 10), num_blocks=1)
    assert alive.on_heartbeat(D, beat(epoch=2), 0.1)
    assert alive.workers[D].bookings.total.num_requests == 0
    assert alive.needs_hello(D)


def test_a_hello_with_a_new_epoch_ends_the_old_life(alive):
    assert not alive.on_hello(D, hello(), 0.1)
    assert alive.on_hello(D, hello(epoch=2), 0.1)


def test_a_cut_connection_ends_the_life_once(alive):
    assert alive.on_cut(D)
    assert not alive.on_cut(D)


def test_a_worker_of_the_wrong_role_is_never_ready(registry):
    registry.on_hello(D, hello(role="prefill"), 0.0)
    registry.on_heartbeat(D, beat(), 0.0)
    assert "it is a prefill worker, but is configured as a decode worker" in registry.missing("decode", 0.0)


def test_a_worker_with_empty_blocks_is_never_ready(registry):
    registry.on_hello(D, hello(block_size=0), 0.0)
    registry.on_heartbeat(D, beat(), 0.0)
    assert registry.ready("decode") == []


def test_missing_names_the_workers(alive):
    alive.sweep(0.0), alive.sweep(0.9), alive.sweep(1.8), alive.sweep(2.7)
    expected = (
        "no decode worker is ready (1 configured: worker decode-1: silent for more than 2 s, last message 3.1 s ago)"
    )
    assert alive.missing("decode", 3.1) == expected
    assert "no hello received yet" in alive.missing("prefill", 3.1)


def test_the_pool_bounds_the_longest_sequence(alive):
    alive.on_hello(D, hello(epoch=2, max_model_len=10_000), 0.1)
    alive.on_heartbeat(D, beat(epoch=2), 0.1)
    assert alive.max_model_len() == 1600


def test_a_report_counts_what_the_worker_had_when_it_wrote_it(alive):
    worker = alive.workers[D]
    prompt = StepShape.of_prompt(0, 10)
    first = alive.book(D, 0.0, prompt=prompt, num_blocks=1)
    assert (worker.load.num_requests, worker.load.num_queued_tokens) == (1, 10)
    alive.on_heartbeat(D, beat(num_running=5, num_waiting_tokens=70), 0.1)
    assert (worker.load.num_requests, worker.load.num_queued_tokens) == (6, 80), (
        "five are other routers'; ours is under way"
    )
    alive.on_heartbeat(D, beat(num_running=6, num_waiting_tokens=80, serial=first.serial), 0.2)
    assert (worker.load.num_requests, worker.load.num_queued_tokens) == (6, 80)
    alive.book(D, 0.0, prompt=prompt, num_blocks=1)
    assert (worker.load.num_requests, worker.load.num_queued_tokens) == (7, 90)


def test_what_ended_since_the_report_makes_room_at_once(alive):
    worker = alive.workers[D]
    mine = alive.book(D, 0.0, prompt=StepShape.of_prompt(0, 10), num_blocks=40)
    alive.on_heartbeat(D, beat(num_running=3, num_waiting_tokens=70, num_free_blocks=20, serial=mine.serial), 0.1)
    mine = alive.computed(mine, 0.0)
    assert (worker.load.num_requests, worker.load.num_queued_tokens) == (3, 60)
    alive.release(mine)
    assert (worker.load.num_requests, worker.load.num_queued_tokens, worker.load.num_available_blocks) == (2, 60, 60)
    alive.on_heartbeat(D, beat(num_running=2, num_waiting_tokens=55, num_free_blocks=60, serial=mine.serial), 0.2)
    assert (worker.load.num_requests, worker.load.num_queued_tokens, worker.load.num_available_blocks) == (2, 55, 60)


def test_what_ends_before_any_report_counts_it_is_gone(alive):
    worker = alive.workers[D]
    mine = alive.book(D, 0.0, prompt=StepShape.of_prompt(0, 10), num_blocks=40)
    alive.on_heartbeat(D, beat(num_running=3, num_waiting_tokens=70, num_free_blocks=50), 0.1)
    assert (worker.load.num_requests, worker.load.num_queued_tokens, worker.load.num_available_blocks) == (4, 80, 10)
    alive.release(alive.computed(mine, 0.0))
    assert (worker.load.num_requests, worker.load.num_queued_tokens, worker.load.num_available_blocks) == (3, 70, 50)


def test_a_worker_that_fails_in_a_row_is_suspect_for_a_while(alive):
    for _ in range(3):
        alive.on_request_failed(D, 0.0)
    alive.sweep(1.0)
    assert alive.workers[D].life.suspect
    alive.sweep(5.1)
    assert not alive.workers[D].life.suspect


def test_a_worker_that_always_fails_is_suspect_for_the_longest_time(alive):
    for _ in range(2000):
        alive.on_request_failed(D, 0.0)
    assert alive.workers[D].life.suspect_until == MAX_SUSPECT_S


steps = st.lists(st.sampled_from(["book", "release", "computed", "beat", "restart"]), max_size=40)


@given(steps)
def test_bookings_never_leak(actions):
    registry = WorkerRegistry([], [D], worker_timeout_s=2.0)
    registry.on_hello(D, hello(), 0.0)
    bookings, epoch = [], 1
    for action in actions:
        if action == "book":
            bookings.append(registry.book(D, 0.0, prompt=StepShape.of_prompt(0, 7), num_blocks=3))
        elif action == "beat":
            registry.on_heartbeat(D, beat(epoch=epoch), 0.0)
        elif action == "restart":
            epoch += 1
            registry.on_hello(D, hello(epoch=epoch), 0.0)
        elif bookings and action == "computed":
            bookings[-1] = registry.computed(bookings[-1], 0.0)
        elif bookings:
            registry.release(bookings.pop(0))
    for booking in bookings * 2:
        registry.release(booking)
    load = registry.workers[D].bookings.total
    assert (load.num_requests, load.num_tokens, load.num_blocks) == (0, 0, 0)
    registry.on_heartbeat(D, beat(epoch=epoch), 0.0)
    fresh = registry.workers[D].bookings.fresh
    assert (fresh.num_requests, fresh.num_tokens, fresh.num_blocks) == (0, 0, 0)


def test_a_worker_works_in_the_role_that_it_says_and_belongs_where_it_is_at_home(alive):
    other = hello("prefill", epoch=2, home="decode")
    assert alive.on_hello(D, other, 0.1), "the life in the role before has ended"
    alive.on_heartbeat(D, beat(epoch=2), 0.1)
    assert [worker.address for worker in alive.ready("prefill")] == [D]
    assert alive.ready("decode") == [] and alive.workers[D].home == "decode"
    assert alive.role_changes == {("decode", "prefill"): 1}
    assert alive.missing("decode", 0.1) == "no decode worker is ready (1 configured: all have changed their role)"
    alive.on_cut(D)
    alive.on_hello(D, hello("decode", epoch=3, home="decode"), 0.2)
    alive.on_heartbeat(D, beat(epoch=3), 0.2)
    assert [worker.address for worker in alive.ready("decode")] == [D]


@pytest.mark.parametrize(
    ("role", "home", "why"),
    [
        ("prefill", "prefill", "it is a prefill worker, but is configured as a decode worker"),
        ("decode", "prefill", "it is a prefill worker, but is configured as a decode worker"),
        ("both", "decode", "unknown role 'both'"),
    ],
)
def test_a_worker_that_is_at_home_elsewhere_is_refused(registry, role, home, why):
    registry.on_hello(D, hello(role, home=home), 0.0)
    registry.on_heartbeat(D, beat(), 0.0)
    assert registry.workers[D].reason == why
    assert registry.ready("prefill") == registry.ready("decode") == []


CHANGES = {
    "hello": lambda registry, now: registry.on_hello(D, hello(), now),
    "longer": lambda registry, now: registry.on_hello(D, hello(max_model_len=1024, weights="other"), now),
    "restart": lambda registry, now: registry.on_hello(D, hello(epoch=2), now),
    "beat": lambda registry, now: registry.on_heartbeat(D, beat(step=int(now * 10)), now),
    "later life": lambda registry, now: registry.on_heartbeat(D, beat(epoch=2), now),
    "loading": lambda registry, now: registry.on_heartbeat(D, beat(ready=False), now),
    "draining": lambda registry, now: registry.on_heartbeat(D, beat(draining=True), now),
    "cut": lambda registry, now: registry.on_cut(D),
    "forgotten": lambda registry, now: registry.on_forgotten(D),
    "withheld": lambda registry, now: registry.withhold(D, "is leaving"),
    "back": lambda registry, now: registry.withhold(D, ""),
    "sweep": lambda registry, now: registry.sweep(now),
    "silence": lambda registry, now: [registry.sweep(now + 1.5 * step) for step in range(9)],
    "replaced": lambda registry, now: (registry.remove(D), registry.add(D, "decode")),
    "prefill": lambda registry, now: registry.on_hello(D, hello("prefill", epoch=3, home="decode"), now),
    "beat of prefill": lambda registry, now: registry.on_heartbeat(D, beat(epoch=3, step=int(now * 10)), now),
}


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_ready_workers_are_kept_and_still_true(names):
    """The sums that are kept of workers are those that a look at each of them would find."""
    registry = WorkerRegistry([P], [D, "tcp://d:2"], worker_timeout_s=2.0)
    registry.on_hello("tcp://d:2", hello(), 0.0)
    registry.on_heartbeat("tcp://d:2", beat(turn_limit_s=1000.0), 0.0)
    for number, name in enumerate(["beat", "hello", "beat", *names], 1):
        CHANGES[name](registry, number / 10)
        for role in ("prefill", "decode"):
            ready = [worker for worker in registry.workers.values() if worker.ready and worker.role == role]
            assert registry.ready(role) == ready


def test_draining_workers_are_known_until_they_are_no_longer_so(alive):
    assert alive.draining == set()
    alive.on_heartbeat(D, beat(step=2, draining=True), 0.1)
    assert alive.draining == {D}
    alive.on_heartbeat(D, beat(step=3), 0.2)
    assert alive.draining == set()
    alive.on_heartbeat(D, beat(step=4, draining=True), 0.3)
    alive.on_cut(D)
    assert alive.draining == set()


def test_what_is_no_longer_observed_counts_no_more(alive):
    alive.on_observed({D: 2.0}, {D: 5.0}, {1: {D: 1.0}})
    worker = alive.workers[D]
    assert (worker.estimates.observed_s, worker.estimates.lasting_s, worker.estimates.observed_from) == (
        2.0,
        5.0,
        {1: 1.0},
    )
    alive.on_observed({P: 3.0}, {}, {})
    assert (worker.estimates.observed_s, worker.estimates.lasting_s, worker.estimates.observed_from) == (0.0, 0.0, {})
    assert alive.workers[P].estimates.observed_s == 3.0


def test_rivals_are_what_workers_report_beside_our_own(alive):
    booking = alive.book(D, 0.0, prompt=StepShape(), num_blocks=1)
    for step in range(2, 40):
        alive.on_heartbeat(D, beat(step=step, num_running=4, serial=booking.serial), 0.1 * step)
        alive.sweep(0.1 * step)
    assert alive.workers[D].estimates.other_routers == pytest.approx(3.0, rel=0.01), (
        "one request of ours, three of others"
    )
