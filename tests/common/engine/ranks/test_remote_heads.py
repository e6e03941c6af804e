"""KV heads of ranks on other hosts: what is gathered and scattered over connections, and what ends them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from common.engine.kv import sharded_cache
from common.engine.kv.block_ring import BlockRing
from common.engine.kv.cache import KVCache
from common.engine.kv.checksums import checksum
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.engine.kv.sharded_cache import ShardedCache, segments
from common.engine.kv.staging import GatheredOutgoing, StagedIncoming, incoming_blocks, outgoing_blocks
from common.engine.ranks import kv_memory
from common.engine.ranks.channel import Channel
from common.engine.ranks.connection import configured
from common.engine.ranks.kv_memory import CLEAR, READ, WRITE, RemoteKVHeads, serve_kv_heads
from common.engine.transfer.transports.shm import PeerMemory, RingSlotSource
from common.errors import RankLost
from common.model_files.architecture.shard import Shard
from common.model_files.config import ModelConfig, from_hf
from common.model_files.tiny import make_tiny_model

from ....late_stream import ring_over

BLOCKS, BLOCK_SIZE = 6, 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """8 heads, 4 KV heads."""
    folder = make_tiny_model(tmp_path_factory.mktemp("heads") / "tiny")
    return replace(from_hf(folder / "config.json"), num_heads=8, num_kv_heads=4)


def connected() -> tuple[Channel, Channel]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return Channel(configured(ours), "rank 1"), Channel(configured(theirs), "rank 0")


class Hosts:
    """The caches of all ranks of a worker on `hosts` hosts, those of the first one mapped, the others over TCP."""

    def __init__(self, config: ModelConfig, size: int, hosts: int, kv_dtype: str = "float32") -> None:
        self.config, self.size = config, size
        self.kv = ShardedCache(config, size, BLOCKS, BLOCK_SIZE, kv_dtype)
        here, self.caches = size // hosts, [self.kv]
        self.ends: list[Channel] = []
        self.threads: list[threading.Thread] = []
        for rank in range(1, size):
            other = KVCache(Shard(rank, size).of(config), BLOCKS, BLOCK_SIZE, kv_dtype, share=rank < here)
            self.caches.append(other)
            if rank < here:
                assert other.shared is not None
                self.kv.attach_file(other.shared.offer.fd)
                continue
            ours, theirs = connected()
            self.ends += [ours, theirs]
            self.threads.append(threading.Thread(target=serve_kv_heads, args=(other, theirs), daemon=True))
            self.threads[-1].start()
            self.kv.attach_remote(RemoteKVHeads(ours))

    def write(self, index: int, whole: torch.Tensor) -> None:
        """As the steps of the ranks do. `whole` is uint8 [layers, KV heads, bytes]."""
        for rank, kv in enumerate(self.caches):
            heads = Shard(rank, self.size).kv_heads(self.config.num_kv_heads)
            bytes_of(kv, index).copy_(whole[:, heads.start : heads.stop])

    def close(self) -> None:
        for end in self.ends:
            end.cut()
        for thread in self.threads:
            thread.join(10.0)
            assert not thread.is_alive()
        for end in self.ends:
            end.close()


def bytes_of(kv: KVCache, index: int) -> torch.Tensor:
    """uint8 [layers, the rank's KV heads, bytes]."""
    block = kv.tensor[index]
    return block.view(torch.uint8).view(*block.shape[:2], -1)


def random_block(kv: KVCache) -> torch.Tensor:
    return torch.randint(0, 256, (kv.config.num_layers, 4, kv.wire_bytes // kv.config.num_layers // 4)).byte()


@pytest.fixture
def two(config: ModelConfig) -> Iterator[Hosts]:
    hosts = Hosts(config, 2, 2)
    yield hosts
    hosts.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8", "int8"])
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_heads_cross_hosts(config: ModelConfig, size: int, hosts: int, kv_dtype: str) -> None:
    """Several blocks at once, both ways, byte for byte; with 8 ranks two have the same head."""
    source, target = Hosts(config, size, hosts, kv_dtype), Hosts(config, size, hosts, kv_dtype)
    blocks = {index: random_block(source.kv) for index in (1, 3, 4)}
    for index, whole in blocks.items():
        source.write(index, whole)
    outgoing, incoming = outgoing_blocks(source.kv), incoming_blocks(target.kv)
    for index, whole in blocks.items():
        view = outgoing.view(index)
        assert bytes(view) == whole.numpy().tobytes()
        incoming.view(5 - index)[:] = view
    incoming.commit([5 - index for index in blocks])
    for rank, kv in enumerate(target.caches):
        heads = Shard(rank, size).kv_heads(4)
        for index, whole in blocks.items():
            assert torch.equal(bytes_of(kv, 5 - index), whole[:, heads.start : heads.stop])
        assert not any(bytes_of(kv, index).any() for index in (0, 3, 5))
    source.close()
    target.close()


def test_blocks_asked_for_together_come_in_order(two: Hosts) -> None:
    blocks = [random_block(two.kv) for _ in range(BLOCKS)]
    for index, whole in enumerate(blocks):
        two.write(index, whole)
    found = [torch.zeros(two.kv.wire_bytes, dtype=torch.uint8) for _ in blocks]
    order = [4, 0, 5, 2, 1, 3]
    two.kv.gather_all([(index, found[index]) for index in order])
    for whole, each in zip(blocks, found, strict=True):
        assert torch.equal(each.view(whole.shape), whole)


def test_a_message_of_blocks_is_asked_for_at_once(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it costs one round trip to another host, not one for each block."""
    blocks = [random_block(two.kv) for _ in range(BLOCKS)]
    for index, whole in enumerate(blocks):
        two.write(index, whole)
    calls: list[str] = []
    for name in ("ask", "take"):
        real = getattr(RemoteKVHeads, name)
        monkeypatch.setattr(RemoteKVHeads, name, recorded(name, real, calls))
    outgoing = outgoing_blocks(two.kv)
    assert isinstance(outgoing, GatheredOutgoing)
    views = outgoing.views([4, 0, 5])
    assert [bytes(view) for view in views] == [blocks[index].numpy().tobytes() for index in (4, 0, 5)]
    assert calls == ["ask"] + ["take"] * 3
    del views
    assert bytes(outgoing.view(1)) == blocks[1].numpy().tobytes()
    assert outgoing.num_buffers == 3  # the one that came free was used again


class RoundTrips:
    """Counts how often rank 0 waits for an answer: at the first bytes that it takes after it has sent some."""

    def __init__(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._has_sent = 0, False
        (ours,) = hosts.ends[::2]
        send, receive = ours.send_parts, ours.receive_parts

        def sent(parts: Sequence[memoryview], timeout_s: float) -> None:
            self._has_sent = True
            send(parts, timeout_s)

        def received(parts: Sequence[memoryview], timeout_s: float | None) -> None:
            self.count, self._has_sent = self.count + self._has_sent, False
            receive(parts, timeout_s)

        monkeypatch.setattr(ours, "send_parts", sent)
        monkeypatch.setattr(ours, "receive_parts", received)

    def taken(self) -> int:
        """Since the last call."""
        count, self.count = self.count, 0
        return count


def test_places_of_a_ring_are_filled_in_one_round_trip(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [random_block(two.kv) for _ in range(BLOCKS)]
    for index, whole in enumerate(blocks):
        two.write(index, whole)
    trips, outgoing = RoundTrips(two, monkeypatch), outgoing_blocks(two.kv)
    assert isinstance(outgoing, GatheredOutgoing)
    ring = BlockRing(outgoing, BLOCKS)
    places, checksums = ring.put(("a", 0), "tcp://here", [4, 0, 5])
    assert trips.taken() == 1
    for place, seal, index in zip(places, checksums, (4, 0, 5), strict=True):
        found = ring._places[place].numpy()
        assert bytes(found) == blocks[index].numpy().tobytes() and seal == checksum(found.data)
    assert ring.put(("b", 0), "tcp://here", [1, 2, 3])[0] and trips.taken() == 1
    assert ring.put(("c", 0), "tcp://here", [1]) == ([], []) and trips.taken() == 0  # no place is free
    ring.close()


def test_places_of_a_ring_are_emptied_in_one_round_trip(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is not there leaves the others."""
    rows = torch.randint(0, 256, (4, two.kv.wire_bytes)).byte()
    ring = ring_over(rows, 4, CopyStream(torch.device("cpu")))
    places, checksums = ring.put(("a", 0), "tcp://here", range(3))
    trips, incoming = RoundTrips(two, monkeypatch), incoming_blocks(two.kv)
    assert isinstance(incoming, StagedIncoming)
    memory = PeerMemory(ring.offer)
    reached = RingSlotSource(incoming, memory)
    copies = [(places[0], 5), (99, 1), (places[1], 2), (places[2], 0)]
    assert list(reached.copy(copies)) == [checksums[0], None, checksums[1], checksums[2]]
    assert trips.taken() == 1
    for row, index in enumerate((5, 2, 0)):
        assert bytes(outgoing_blocks(two.kv).view(index)) == rows[row].numpy().tobytes()
    assert not any(bytes_of(kv, 1).any() for kv in two.caches)
    reached.close()
    memory.close()
    ring.close()


def test_frames_of_8_bits_take_one_round_trip_a_message(
    two: Hosts, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, indices = KVCache(config, BLOCKS, BLOCK_SIZE, "float32"), [3, 0, 4]
    outgoing, incoming, expected = quantised_outgoing(two.kv), quantised_incoming(two.kv), quantised_incoming(plain)
    for index in indices:
        plain.tensor[index] = torch.randn(plain.tensor.shape[1:])
        two.write(index, bytes_of(plain, index).clone())
    trips = RoundTrips(two, monkeypatch)
    sent = [bytes(view) for view in outgoing.views(indices)]
    assert trips.taken() == 1
    assert sent == [bytes(view) for view in quantised_outgoing(plain).views(indices)]
    for blocks in (incoming, expected):
        for index, frame in zip((5, 1, 2), sent, strict=True):
            blocks.view(index)[:] = frame
        blocks.commit([5, 1, 2])
    assert trips.taken() == 1
    for rank, kv in enumerate(two.caches):
        heads = Shard(rank, 2).kv_heads(4)
        for index in (5, 1, 2):
            assert torch.equal(bytes_of(kv, index), bytes_of(plain, index)[:, heads.start : heads.stop])
            assert bytes_of(kv, index).any()


def test_a_group_of_blocks_is_bounded_in_bytes(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at most have room in it, and one always."""
    blocks = [random_block(two.kv) for _ in range(BLOCKS)]
    for index, whole in enumerate(blocks):
        two.write(index, whole)
    trips = RoundTrips(two, monkeypatch)
    for most_bytes, expected in ((2 * two.kv.wire_bytes, 3), (1, 5)):
        monkeypatch.setattr(sharded_cache, "GROUP_BYTES", most_bytes)
        found = [torch.zeros(two.kv.wire_bytes, dtype=torch.uint8) for _ in range(5)]
        two.kv.gather_all(list(enumerate(found)))
        assert trips.taken() == expected
        two.kv.scatter_all([(index, each) for index, each in enumerate(reversed(found))])
        assert trips.taken() == expected
        blocks[:5] = reversed(blocks[:5])
        for index, whole in enumerate(blocks):
            assert bytes(outgoing_blocks(two.kv).view(index)) == whole.numpy().tobytes()
        trips.taken()


def recorded(name: str, real: Callable[..., None], calls: list[str]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        calls.append(name)
        real(*arguments)

    return call


def test_blocks_of_8_bits_are_those_of_one_rank(config: ModelConfig) -> None:
    hosts, plain = Hosts(config, 4, 2), KVCache(config, BLOCKS, BLOCK_SIZE, "float32")
    plain.tensor[3] = torch.randn(plain.tensor.shape[1:])
    hosts.write(3, bytes_of(plain, 3).clone())
    sent = bytes(quantised_outgoing(plain).view(3))
    assert bytes(quantised_outgoing(hosts.kv).view(3)) == sent
    for kv in (hosts.kv, plain):
        incoming = quantised_incoming(kv)
        incoming.view(5)[:] = sent
        incoming.commit([5])
    assert plain.tensor[5].any()
    for rank, kv in enumerate(hosts.caches):
        heads = Shard(rank, 4).kv_heads(4)
        assert torch.equal(bytes_of(kv, 5), bytes_of(plain, 5)[:, heads.start : heads.stop])
    hosts.close()


def test_unused_slots_are_cleared_on_other_hosts(two: Hosts) -> None:
    for index in (1, 2):
        two.write(index, torch.full_like(random_block(two.kv), 1))
    two.kv.clear_slots(1, 10)
    for kv in two.caches:
        slots = bytes_of(kv, 1).view(two.config.num_layers, 2, BLOCK_SIZE, -1)
        assert slots[:, :, :10].all() and not slots[:, :, 10:].any()
        assert bytes_of(kv, 2).all()


def test_threads_take_turns(two: Hosts) -> None:
    """A sender, a lender and a tier read and write at a time: each gets the blocks that it asked for."""
    blocks = [random_block(two.kv) for _ in range(4)]
    for index, whole in enumerate(blocks):
        two.write(index, whole)
    wrong: list[int] = []

    def read(index: int) -> None:
        outgoing = outgoing_blocks(two.kv)
        for _ in range(50):
            if bytes(outgoing.view(index)) != blocks[index].numpy().tobytes():
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert wrong == []


def test_a_rank_that_does_not_answer_ends_the_worker(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "ORDER_S", 0.1)
    ours, theirs = connected()
    two.kv._remotes = [RemoteKVHeads(ours)]  # nothing reads at the other end
    began = time.monotonic()
    with pytest.raises(RankLost, match="cannot receive from rank 1: timed out"):
        outgoing_blocks(two.kv).view(0)
    assert time.monotonic() - began < 5.0
    assert ours.is_cut() and theirs.is_cut(5.0)  # an answer that came now would be that of another order
    with pytest.raises(RankLost, match="cannot send to rank 1"):
        two.kv.clear_slots(0, 1)
    ours.close()
    theirs.close()


def test_a_busy_connection_is_waited_for_until_a_deadline(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_cache, "EXCHANGE_TIMEOUT_S", 0.05)
    began = time.monotonic()
    with two.kv._exchange_lock, pytest.raises(RankLost, match=r"timed out after 0\.05 s"):
        two.kv.clear_slots(0, 1)
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize(
    ("kind", "indices", "first", "count"),
    [
        (READ, [BLOCKS], 0, 1),
        (READ, [0, BLOCKS], 0, 1),
        (READ, [0], 1, 2),
        (READ, [0], 0, 0),
        (READ, [], 0, 1),
        (WRITE, [2**32 - 1], 0, 0),
        (WRITE, [0] * 1000, 0, 0),
        (CLEAR, [0], BLOCK_SIZE, 0),
        (9, [0], 0, 1),
    ],
)
def test_an_order_out_of_bounds_ends_the_connection(
    config: ModelConfig, kind: int, indices: list[int], first: int, count: int
) -> None:
    kv = KVCache(Shard(1, 2).of(config), BLOCKS, BLOCK_SIZE, "float32")
    ours, theirs = connected()
    thread = threading.Thread(target=serve_kv_heads, args=(kv, theirs), daemon=True)
    thread.start()
    RemoteKVHeads(ours)._order(kind, indices, first, count)
    assert ours.is_cut(5.0)
    thread.join(5.0)
    assert not thread.is_alive() and not kv.tensor.any()
    ours.close()
    theirs.close()


def test_heads_lie_in_one_place_of_each_layer() -> None:
    block = memoryview(bytes(range(24)))  # 2 layers, 4 heads of 3 bytes
    assert [bytes(part) for part in segments(block, 2, 4, range(1, 3))] == [bytes(range(3, 9)), bytes(range(15, 21))]
    assert [bytes(part) for part in segments(block, 2, 4, range(3, 4))] == [bytes(range(9, 12)), bytes(range(21, 24))]
    assert segments(block, 2, 4, range(4)) == [block]
