"""Tests of `megatron_hetero.runtime.faults`."""
