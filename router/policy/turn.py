"""When the turn of a new prompt comes among those that wait at a worker. Pure.

Without goals workers compute the shortest prompt first (`prompt_order.py`); what a step has begun is not stopped, and a
step takes as many tokens as it can hold. First come, first served would predict three times what a short prompt waits
behind a queue of long ones. With goals a prompt that passes takes from the slack of the others, so there all of them
count: fewer prompts go to a side on which they would make others late.
"""

from __future__ import annotations

import math


def turn_s(all_s: float, own_s: float, shorter_share: float, step_s: float, running_for_s: float) -> float:
    """Seconds that a prompt of `own_s` waits where all that are there take `all_s`, of which shorter ones a share.

    A step that takes `step_s` has run for `running_for_s`; 0 for `step_s`: all of them are in one step. The step that
    ends the new prompt is a full one as long as others are left to fill it: that wait counts, too.
    """
    if step_s <= 0.0 or all_s <= 0.0:
        return max(0.0, all_s)
    running_s = min(all_s, step_s - running_for_s % step_s)
    waiting_s = all_s - running_s
    before_s = waiting_s * shorter_share
    needed_s = before_s + own_s
    filled_s = min(waiting_s + own_s, step_s * math.ceil(needed_s / step_s))
    return running_s + max(needed_s, filled_s) - own_s
