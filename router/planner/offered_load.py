"""What clients ask for, served or not: the load that pools are sized for. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.latency import StepShape


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """One recent request: tokens of its prompt, those of them that a prefix cache held, tokens of its answer."""

    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that were computed: at least the last one."""
        return max(1, self.num_prompt - self.num_cached)

    @property
    def prompt(self) -> StepShape:
        """The same, as what a step computes."""
        return StepShape.of_prompt(self.num_prompt - self.num_uncached, self.num_prompt)


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests a second, refused ones included, and a sample of them, each as likely as the others.

    `rate` is that of the last minute. `rate_ahead`, at least `rate`, is expected once a worker that is started now is
    ready. `burstiness`: the variance of the number of arrivals over its mean, 1 for independent clients; the squared
    coefficient of variation of the times between arrivals comes to the same over long windows. Nothing has arrived for
    `idle_s` seconds.
    """

    rate: float = 0.0
    rate_ahead: float = 0.0
    burstiness: float = 1.0
    requests: tuple[SampledRequest, ...] = ()
    idle_s: float = 0.0

    def at(self, rate: float) -> OfferedLoad:
        """The same requests at another rate."""
        return replace(self, rate=rate, rate_ahead=rate)

    def split(self, threshold: int) -> tuple[OfferedLoad, OfferedLoad]:
        """The load whose prompts prefill workers compute, and the load whose prompts, of at most `threshold` uncached
        tokens, decode workers compute themselves."""
        remote = tuple(one for one in self.requests if one.num_uncached > threshold)
        local = tuple(one for one in self.requests if one.num_uncached <= threshold)
        share = len(remote) / len(self.requests) if self.requests else 1.0
        return (
            replace(self, rate=self.rate * share, rate_ahead=self.rate_ahead * share, requests=remote),
            replace(self, rate=self.rate * (1 - share), rate_ahead=self.rate_ahead * (1 - share), requests=local),
        )
