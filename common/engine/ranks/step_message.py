"""What rank 0 has the others do, each as one message of int32 numbers: run chunks, record steps, replay one. Pure.

number of chunks, of tokens │ 5 numbers a chunk: tokens, start, blocks, flags, adapter │ token ids │ block tables
RECORD │ most rows │ most blocks of a sequence │ 1 to record what adapters add
REPLAY │ rows │ 1 for what adapters add │ changes of seats │ their places │ their words, of two numbers each
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.engine.models import SequenceChunk
from common.engine.run import SeatChanges, StepLaunch, StepSizes

Numbers = npt.NDArray[np.int32]
HEAD, FIELDS = 2, 5
RECORD, REPLAY, REPLAY_HEAD = -1, -2, 4
SAMPLE, ALL_LOGITS = 1, 2


def pack_step(chunks: Sequence[SequenceChunk], block_size: int) -> Numbers:
    """The message of a step."""
    used = [-(-(chunk.start + len(chunk.token_ids)) // block_size) for chunk in chunks]
    tokens = sum(len(chunk.token_ids) for chunk in chunks)
    packed = np.empty(HEAD + FIELDS * len(chunks) + tokens + sum(used), dtype=np.int32)
    packed[:HEAD] = (len(chunks), tokens)
    at = HEAD
    for chunk, blocks in zip(chunks, used, strict=True):
        flags = SAMPLE * chunk.sample | ALL_LOGITS * chunk.all_logits
        packed[at : at + FIELDS] = (len(chunk.token_ids), chunk.start, blocks, flags, chunk.adapter)
        at += FIELDS
    for chunk in chunks:
        packed[at : at + len(chunk.token_ids)] = chunk.token_ids
        at += len(chunk.token_ids)
    for chunk, blocks in zip(chunks, used, strict=True):
        packed[at : at + blocks] = chunk.block_table[:blocks]
        at += blocks
    return packed


def token_ids_of(packed: Numbers) -> Numbers:
    """The token ids of a packed step, to be written in place: int32 [T]."""
    first = HEAD + FIELDS * int(packed[0])
    return packed[first : first + int(packed[1])]


def pack_sizes(sizes: StepSizes) -> Numbers:
    """The order to record steps."""
    return np.array((RECORD, sizes.max_num_seqs, sizes.max_blocks, sizes.adapts), dtype=np.int32)


def pack_launch(launch: StepLaunch) -> Numbers:
    """The message of a recorded step. Without changes it is four numbers."""
    places, words = launch.changes
    head = np.array((REPLAY, launch.size, launch.adapted, len(places)), dtype=np.int32)
    return np.concatenate((head, places.astype(np.int32), words.view(np.int32)))


def unpack(packed: Numbers) -> list[SequenceChunk] | StepSizes | StepLaunch:
    """What a message asks for."""
    if packed[0] == RECORD:
        max_num_seqs, max_blocks, adapts = packed[1:].tolist()
        return StepSizes(max_num_seqs, max_blocks, bool(adapts))
    if packed[0] == REPLAY:
        size, adapted, count = packed[1:REPLAY_HEAD].tolist()
        places, words = np.split(packed[REPLAY_HEAD:], [count])
        # Copies, because words of 64 bits may begin anywhere in a message.
        return StepLaunch(size, bool(adapted), SeatChanges(places.astype(np.int64), words.copy().view(np.int64)))
    return unpack_step(packed)


def unpack_step(packed: Numbers) -> list[SequenceChunk]:
    """The chunks of a message."""
    count, total = (int(number) for number in packed[:HEAD])
    first = HEAD + FIELDS * count
    table = first + total
    chunks = []
    for tokens, start, blocks, flags, adapter in packed[HEAD:first].reshape(count, FIELDS).tolist():
        chunks.append(
            SequenceChunk(
                packed[first : first + tokens].tolist(),
                start,
                packed[table : table + blocks].tolist(),
                sample=bool(flags & SAMPLE),
                all_logits=bool(flags & ALL_LOGITS),
                adapter=adapter,
            )
        )
        first, table = first + tokens, table + blocks
    return chunks
