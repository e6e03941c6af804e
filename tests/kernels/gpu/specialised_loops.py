"""Compiles attention's loop, bare, with `warp_specialize`, and prints as JSON what became of it, a line a case.

A program of its own, whose Triton does not interpret. Its arguments are cases: CAPABILITY,WARPS,ROWS,LOOP. A line has
the warps of a program and its number of `setmaxnreg`, or zeros where the compiler gave up.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KEYS, DIM = 64, 64
LOOPS = ("one", "two", "pointers")
"""One over all keys; another one behind it, as over the diagonal; one, whose queries were read by pointers."""


@triton.jit
def attend(
    q, p_q, boxes, table, out, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    o = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    b_q = tl.load(p_q + o) if LOOP == 2 else q.load([0, 0])
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, end, BLOCK_N, num_stages=3, warp_specialize=True):
        b_m, b_l, b_acc = attend_keys(b_q, b_m, b_l, b_acc, boxes, table, start, BLOCK_N, BLOCK_D)
    if LOOP == 1:
        for start in tl.range(end, end + 2 * BLOCK_N, BLOCK_N, num_stages=1):
            b_m, b_l, b_acc = attend_keys(b_q, b_m, b_l, b_acc, boxes, table, start, BLOCK_N, BLOCK_D)
    tl.store(out + o, b_acc / b_l[:, None])


@triton.jit
def attend_keys(b_q, b_m, b_l, b_acc, boxes, table, start, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    i_box = tl.load(table + start // BLOCK_N)
    b_s = tl.dot(b_q, boxes.load([i_box, 0, 0]).reshape(BLOCK_N, BLOCK_D).T)
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new[:, None])
    b_shrink = tl.exp2(b_m - b_new)
    b_v = boxes.load([i_box, 1, 0]).reshape(BLOCK_N, BLOCK_D)
    return b_new, b_l * b_shrink + tl.sum(b_p, 1), tl.dot(b_p.to(tl.bfloat16), b_v, b_acc * b_shrink[:, None])


def compiled(capability: int, warps: int, rows: int, loop: str) -> dict[str, int]:
    signature = {"q": f"tensordesc<bf16[{rows}, {DIM}]>", "p_q": "*bf16", "table": "*i32", "out": "*fp32", "end": "i32"}
    signature["boxes"] = f"tensordesc<bf16[{KEYS}, 1, {DIM}]>"
    known = {"BLOCK_M": rows, "BLOCK_N": KEYS, "BLOCK_D": DIM, "LOOP": LOOPS.index(loop)}
    names = attend.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    source = ASTSource(attend, types, {(names.index(name),): value for name, value in known.items()}, {})
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    except RuntimeError:  # a pass of the compiler failed: its words are on standard error
        return {"warps": 0, "setmaxnreg": 0}
    return {"warps": kernel.metadata.num_warps, "setmaxnreg": kernel.asm["ptx"].count("setmaxnreg")}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        capability, warps, rows, loop = case.split(",")
        print(json.dumps(compiled(int(capability), int(warps), int(rows), loop)), flush=True)
