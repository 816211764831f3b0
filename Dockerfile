# syntax=docker/dockerfile:1
# The runtime of megatron-hetero, from the wheel that `make dist` builds:   make image
#
# BASE: any Debian or Ubuntu image with Python 3.12 or 3.13 (SkyPilot takes no others).  torch brings
# its CUDA libraries along; the driver comes from the machine, by the NVIDIA container toolkit.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

# Triton compiles its launchers with a C compiler when a kernel runs first.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The extra pins every version to the one with which the tests pass; the linter sees no pins here.
# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist,target=/dist \
    wheel=$(find /dist -name 'megatron_hetero-*.whl') \
    && python -m pip install --no-cache-dir "${wheel}[tested]" \
    && megatron-hetero --version

WORKDIR /workspace
CMD ["megatron-hetero", "--help"]
