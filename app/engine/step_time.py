"""How long an engine's steps take, learned from the steps themselves: `StepTimeModel`. Pure.

Nothing about a GPU or a model is built in. A step's time is fitted as

    t = f(tokens) + a attended + b context + c decodes + d prefills

with f a rising curve made of straight pieces (it holds the fixed part, and the bend where reading the weights gives
way to computing), `attended` the token pairs of the prefills' attention, `context` the tokens in the decodes' KV
caches. All coefficients are at least 0, so more work never takes less time. The fit is by least squares of relative
errors over a sample of past steps, even over step sizes, in which newer ones weigh more and steps far off the rest
little; between fits a factor follows what the last steps took.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Bends of the curve, in tokens: where the pieces begin.
_KNOTS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OTHERS = 4
_PIECES = len(_KNOTS)
_COLUMNS = 1 + _PIECES + _OTHERS

_PER_BUCKET = 96
_HALF_LIFE_STEPS = 400
_FIT_EVERY = 16
_FIT_ALWAYS_UNTIL = 32
_RECENT = 16
# How far the factor goes towards what the last step says. What slows a machine down mostly lasts for several steps; on
# a CPU shared with others, following fast halves the error.
_FOLLOW = 0.5
_MOST_PER_STEP = 1.5
_MOST_DRIFT = 4.0
# Relative errors beyond this, or beyond a few usual ones, make a step count less.
_USUAL_ERROR = 0.1
# When so many steps in a row are off to the same side by this factor, the engine has changed its speed, and what was
# seen before is taken to have changed with it. From a few on, whether it has is waited for before the next fit.
_JUMP_STEPS = 14
_JUMP_DOUBT_STEPS = 4
_JUMP = 1.2
# How strongly neighbouring pieces are held to the same slope where steps don't tell them apart.
_SMOOTHNESS = 1e-4
_RIDGE = 1e-7
_ERRORS = 300
_FIRST_TOKENS = 256


class StepWork(NamedTuple):
    """What one step computes.

    `decodes`: sequences that decode; `decode_tokens`: their tokens, more than one each with speculative decoding;
    `decode_context_tokens`: tokens in their KV caches, together; `prefills`: chunks of prompts; `prefill_tokens`: their
    tokens; `attended_tokens`: for chunks of c tokens at depth d, the sum of c d + c^2 / 2.
    """

    decodes: int = 0
    decode_tokens: int = 0
    decode_context_tokens: int = 0
    prefill_tokens: int = 0
    attended_tokens: float = 0.0
    prefills: int = 0


@dataclass(slots=True)
class _Seen:
    work: StepWork
    row: list[float]
    seconds: float
    step: int


class StepTimeModel:
    """Step times of one engine. `steps`: how many it has seen."""

    def __init__(self) -> None:
        self.steps = 0
        self._buckets: dict[tuple[int, bool], deque[_Seen]] = {}
        self._recent: deque[_Seen] = deque(maxlen=_RECENT)
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._largest = 0
        self._factor = 1.0
        # Steps in a row that took longer (above 0) or shorter (below 0) than the fit says, by `_JUMP` or more.
        self._run = 0
        # f at the knots and its slope after each; then what attended, context, decodes and prefills cost each.
        self._at_knots = [0.0] * _PIECES
        self._slopes = [0.0] * _PIECES
        self._attended = self._context = self._decode = self._prefill = 0.0

    @property
    def error_p50(self) -> float:
        """Median relative error of the last predictions; nan before the first."""
        return self._error(0.5)

    @property
    def error_p90(self) -> float:
        """90th percentile of the relative error of the last predictions; nan before the first."""
        return self._error(0.9)

    def cautious_tokens(self) -> int:
        """How large a step may be, in tokens, without going far beyond what was seen."""
        return max(_FIRST_TOKENS, 2 * self._largest)

    def seconds(self, work: StepWork) -> float:
        """How long a step takes; 0.0 before anything is known."""
        return self._factor * self._fitted(work)

    def prefill_tokens_within(self, work: StepWork, seconds: float, depth: int, most: int) -> int:
        """How many tokens of one more prefill, at this depth, fit into a step with `work` that takes `seconds`.

        At least 0, at most `most`.
        """
        base = work.decode_tokens + work.prefill_tokens
        target = seconds / self._factor
        attended, context, prefills = work.attended_tokens, work.decode_context_tokens, work.prefills + 1

        def fits(tokens: int) -> bool:
            pairs = attended + tokens * (depth + tokens / 2)
            return self._raw(base + tokens, pairs, context, work.decodes, prefills) <= target

        if most <= 0 or fits(most):
            return max(0, most)
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low

    def prefill_rates(self, work: StepWork, tokens: int) -> tuple[float, float]:
        """What each of so many prefill tokens adds to a step with `work`, and each pair of tokens that attend to one
        another, in seconds."""
        more = work._replace(prefill_tokens=work.prefill_tokens + tokens, prefills=work.prefills + 1)
        return max(0.0, self.seconds(more) - self.seconds(work)) / tokens, self._factor * self._attended

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`; one that is not above 0 is passed over."""
        tokens = work.decode_tokens + work.prefill_tokens
        if not 0 < seconds < math.inf or tokens <= 0:
            return
        predicted = self.seconds(work)
        if predicted:
            self._errors.append(abs(predicted - seconds) / seconds)
            self._note_run(seconds / predicted * self._factor)
            self._follow(seconds / predicted)
        self.steps += 1
        self._largest = max(self._largest, tokens)
        seen = _Seen(work, _row(work), seconds, self.steps)
        # Steps with and without prefill of one size differ most, so each has its own sample.
        bucket = (tokens.bit_length(), work.prefill_tokens > 0)
        self._buckets.setdefault(bucket, deque(maxlen=_PER_BUCKET)).append(seen)
        self._recent.append(seen)
        if self.steps <= _FIT_ALWAYS_UNTIL:
            self._fit()
        elif abs(self._run) >= _JUMP_STEPS:
            self._take_jump()
            self._fit()
        elif self.steps % _FIT_EVERY == 0 and abs(self._run) < _JUMP_DOUBT_STEPS:
            self._fit()

    def _fitted(self, work: StepWork) -> float:
        return self._raw(
            work.decode_tokens + work.prefill_tokens,
            work.attended_tokens,
            work.decode_context_tokens,
            work.decodes,
            work.prefills,
        )

    def _raw(self, tokens: int, attended: float, context: int, decodes: int, prefills: int) -> float:
        piece = bisect.bisect_right(_KNOTS, tokens) - 1
        return (
            self._at_knots[piece]
            + self._slopes[piece] * (tokens - _KNOTS[piece])
            + self._attended * attended
            + self._context * context
            + self._decode * decodes
            + self._prefill * prefills
        )

    def _follow(self, ratio: float) -> None:
        factor = self._factor * (1 + _FOLLOW * (min(_MOST_PER_STEP, max(1 / _MOST_PER_STEP, ratio)) - 1))
        self._factor = min(_MOST_DRIFT, max(1 / _MOST_DRIFT, factor))

    def _fit(self) -> None:
        samples = [seen for bucket in self._buckets.values() for seen in bucket]
        rows = np.array([seen.row for seen in samples])
        seconds = np.array([seen.seconds for seen in samples])
        ages = np.array([self.steps - seen.step for seen in samples])
        weights = np.exp2(-ages / _HALF_LIFE_STEPS)
        relative = rows / seconds[:, None]
        coefficients = _solve(relative, weights, seconds)
        errors = np.abs(relative @ coefficients - 1)
        usual = max(_USUAL_ERROR, 3 * float(np.median(errors)))
        if errors.max() > usual:
            weights = weights / np.maximum(1, errors / usual) ** 3
            coefficients = _solve(relative, weights, seconds)
        slopes = coefficients[1 : 1 + _PIECES]
        at_knots = coefficients[0] + np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(_KNOTS))))
        self._at_knots, self._slopes = at_knots.tolist(), slopes.tolist()
        self._attended, self._context, self._decode, self._prefill = coefficients[1 + _PIECES :].tolist()
        self._factor = 1.0
        for seen in self._recent:
            if fitted := self._fitted(seen.work):
                self._follow(seen.seconds / (fitted * self._factor))

    def _note_run(self, ratio: float) -> None:
        side = (ratio > _JUMP) - (ratio < 1 / _JUMP)
        self._run = self._run + side if side and side * self._run >= 0 else side

    def _take_jump(self) -> None:
        run = list(self._recent)[-_JUMP_STEPS:]
        ratios = [seen.seconds / fitted for seen in run if (fitted := self._fitted(seen.work))]
        change = statistics.median(ratios) if ratios else 1.0
        after = {seen.step for seen in run}
        for bucket in self._buckets.values():
            for seen in bucket:
                if seen.step not in after:
                    seen.seconds *= change
        self._run = 0

    def _error(self, share: float) -> float:
        if not self._errors:
            return math.nan
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _row(work: StepWork) -> list[float]:
    tokens = work.decode_tokens + work.prefill_tokens
    ends = (*_KNOTS[1:], math.inf)
    pieces = [float(min(max(tokens - begin, 0), end - begin)) for begin, end in zip(_KNOTS, ends, strict=True)]
    return [1.0, *pieces, work.attended_tokens, work.decode_context_tokens, work.decodes, work.prefills]


def _solve(rows: Any, weights: Any, seconds: Any) -> Any:
    """Coefficients of at least 0 with the least weighted squares of `rows @ coefficients - 1`."""
    weighted = rows * weights[:, None]
    gram = rows.T @ weighted
    target = weighted.sum(axis=0)
    total = float(weights.sum())
    # A slope that differs from its neighbour's should cost as much as the error it would make over half its piece.
    for index in range(1, _PIECES):
        size = _KNOTS[index] / float(np.mean(seconds))
        strength = _SMOOTHNESS * total * min(size, 1e9) ** 2
        here, before = 1 + index, index
        gram[here, here] += strength
        gram[before, before] += strength
        gram[here, before] -= strength
        gram[before, here] -= strength
    scale = np.sqrt(np.maximum(np.diagonal(gram), 1e-300))
    gram = gram / scale / scale[:, None]
    gram[np.diag_indices(_COLUMNS)] += _RIDGE
    return _nonnegative(gram, target / scale) / scale


def _nonnegative(gram: Any, target: Any) -> Any:
    """The x >= 0 that minimises x' gram x / 2 - target' x, by the active sets of Lawson and Hanson (1974), ch. 23."""
    solution = np.zeros(_COLUMNS)
    is_free = np.zeros(_COLUMNS, dtype=bool)
    for _ in range(3 * _COLUMNS):
        gradient = target - gram @ solution
        gradient[is_free] = -math.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-9:
            break
        is_free[best] = True
        while True:
            free = np.flatnonzero(is_free)
            candidate = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if candidate.min() > 0:
                break
            shrinking = candidate <= 0
            current = solution[free]
            share = np.min(current[shrinking] / np.maximum(current[shrinking] - candidate[shrinking], 1e-300))
            solution[free] = current + share * (candidate - current)
            is_free[free[shrinking & (solution[free] <= 1e-15)]] = False
            solution[~is_free] = 0.0
            if not is_free.any():
                return solution
        solution[:] = 0.0
        solution[free] = candidate
    return solution
