"""Requests drawn from a known truth, to try statistics on: what a noisy server would have given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raytune_eagle.model.measurement import Request


@dataclass(frozen=True)
class Truth:
    """What the generated requests are drawn from.

    Attributes:
        speed: tokens per second and stream, over all prompts.
        pass_noise: spread (of the log) that all requests of a pass share: the clocks and the neighbours of that time.
        prompt_spread: spread between the prompts, the same in each pass and on each server: some texts are easy.
        taste: spread between the prompts that differs from server to server (seed), but not between its passes.
        request_noise: spread of a single request.
        drift: by what share the last pass is slower than the first.
    """

    speed: float = 100.0
    passes: int = 10
    prompts: int = 64
    concurrency: int = 8
    tokens: int = 256
    pass_noise: float = 0.03
    prompt_spread: float = 0.3
    taste: float = 0.0
    request_noise: float = 0.05
    drift: float = 0.01

    def throughput(self) -> float:
        """What an endless bench of these prompts would give, half the drift included; tokens per second."""
        slowness = float(np.exp(-self._prompt_logs()).mean())
        return self.concurrency * self.speed / slowness * (1 - self.drift / 2)

    def draw(self, seed: int) -> tuple[Request, ...]:
        """One bench of `passes` passes."""
        rng = np.random.default_rng(seed)
        shape = (self.passes, self.prompts)
        logs = self._prompt_logs() + rng.normal(0, self.taste, self.prompts)
        logs = logs + rng.normal(0, self.pass_noise, (self.passes, 1)) + rng.normal(0, self.request_noise, shape)
        logs = logs + np.log1p(-self.drift * np.linspace(0, 1, self.passes))[:, None]
        seconds = self.tokens / (self.speed * np.exp(logs))
        return tuple(self._row(one, prompt, float(seconds[one, prompt])) for one, prompt in np.ndindex(shape))

    def _prompt_logs(self) -> np.ndarray:
        return np.random.default_rng(7).normal(0, self.prompt_spread, self.prompts)

    def _row(self, repeat: int, prompt: int, seconds: float) -> Request:
        return Request.model_construct(  # unchecked, or most of the time would go into checks
            concurrency=self.concurrency,
            repeat=repeat,
            prompt_id=f"p{prompt}",
            category="code" if prompt % 2 else "chat",
            started_s=0.0,
            latency_s=seconds,
            completion_tokens=self.tokens,
            verify_rounds=self.tokens // 3,
        )
