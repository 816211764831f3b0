"""Options of stages at random, for chains of two classes of GPUs."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.stages import ChainStageOptions

NUM_LAYERS = 3
GPUS = (2, 2)
"""Of each class."""
SHAPE = tuple(n + 1 for n in GPUS)
_SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])


@st.composite
def options(draw: st.DrawFn) -> ChainStageOptions:
    """Two to four kinds of one or two GPUs; times rise with layers and with what is in flight."""
    num = draw(st.integers(2, 4))
    gpu_class = np.array([0, 1, *(draw(st.integers(0, 1)) for _ in range(num - 2))], np.int64)
    width = np.array([draw(st.integers(1, 2)) for _ in range(num)], np.int64)
    time_s = np.full((num, 4, 3, NUM_LAYERS + 1), inf)
    for kind in range(num):
        layer_s = draw(_SECONDS)
        for place in range(4):
            ends_s = draw(st.sampled_from([0.0, 0.25]))
            most = draw(st.integers(1, NUM_LAYERS))
            for in_flight in range(3):
                most = max(1, most - draw(st.integers(0, 1)))
                layers = np.arange(1, most + 1)
                time_s[kind, place, in_flight, 1 : most + 1] = ends_s + layers * layer_s
    each = np.array([draw(st.sampled_from([0.0, 0.1, 0.4])) for _ in range(num)])
    update_s = np.broadcast_to(
        each[:, None, None] * np.arange(NUM_LAYERS + 1), (num, 4, NUM_LAYERS + 1)
    )
    trip_s = np.array([draw(st.sampled_from([0.1, 1.0, 4.0, inf])) for _ in range(num * num)])
    send_s = np.array([draw(st.sampled_from([0.0, 0.2, 2.0])) for _ in range(num * num)])
    trip_s, send_s = trip_s.reshape(num, num), send_s.reshape(num, num)
    return ChainStageOptions(
        gpu_class,
        width,
        time_s,
        time_s.copy(),
        update_s.copy(),
        np.zeros((num, 4, NUM_LAYERS + 1)),
        trip_s,
        np.where(np.isfinite(trip_s), send_s, 0.0),
        1,
        1,
    )


def steps_of(found: ChainStageOptions) -> np.ndarray:
    """What a stage of each kind takes of the two classes."""
    steps = np.zeros((len(found.width), 2), np.int64)
    steps[np.arange(len(found.width)), found.gpu_class] = found.width
    return steps
