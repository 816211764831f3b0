"""Drawing of tokens from logits, in double precision on the host.

A draw is decided by the request's seed, the token's number in its answer and the logits: neither by
the layout of the replica nor by the requests beside it.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from megatron_hetero.lab.serve.batch import Drawn, Sampling, Segment


def draw(logits: Tensor, segments: tuple[Segment, ...]) -> tuple[Drawn, ...]:
    """Draw a token after each segment.

    Args:
        logits: shape `[segments, vocabulary]`.
        segments: those that draw.
    """
    rows = logits.detach().to("cpu", torch.float64)
    return tuple(
        draw_token(row, segment.sampling, segment.draws or 0)
        for row, segment in zip(rows, segments, strict=True)
    )


def draw_token(logits: Tensor, sampling: Sampling, number: int) -> Drawn:
    """Draw token `number` of an answer from logits `[vocabulary]`.

    The log-probability is the model's own, before temperature and cuts.
    """
    # Natural logarithms, whatever is drawn.
    own = torch.log_softmax(logits, 0)
    if sampling.temperature == 0:
        token = int(torch.argmax(logits))
    else:
        # Below the largest one, so that no temperature divides it to infinity.
        token = _drawn((logits - logits.max()) / sampling.temperature, sampling, number)
    likeliest: tuple[tuple[int, float], ...] = ()
    if sampling.num_logprobs:
        best = torch.topk(own, min(sampling.num_logprobs, len(own)))
        likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Drawn(token, float(own[token]), likeliest)


def _drawn(logits: Tensor, sampling: Sampling, number: int) -> int:
    """Draw by the inverse of the distribution function over tokens in order of likelihood."""
    probabilities, tokens = torch.sort(torch.softmax(logits, 0), descending=True, stable=True)
    kept = len(tokens) if sampling.top_k == 0 else min(sampling.top_k, len(tokens))
    sums = torch.cumsum(probabilities, 0)
    # The smallest set whose probability reaches top_p: those before which less is there.
    kept = min(kept, int((sums - probabilities < sampling.top_p).sum()))
    # One random number for each (seed, place in the answer).
    point = random.Random(f"{sampling.seed}:{number}").random() * float(sums[kept - 1])
    index = int(torch.searchsorted(sums[:kept], torch.tensor(point, dtype=sums.dtype), right=True))
    return int(tokens[min(index, kept - 1)])
