"""A step as one message from rank 0 to the others: the chunks that it runs, in int32 numbers. Pure.

number of chunks, of tokens │ 5 numbers a chunk: tokens, start, blocks, flags, adapter │ token ids │ block tables
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.model.batch import SequenceChunk

Numbers = npt.NDArray[np.int32]
HEAD, FIELDS = 2, 5
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
