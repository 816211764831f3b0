"""Simulation of one optimizer step by events.

step          a plan on its cluster
stage_times   seconds of every stage of a plan
engine        the events
progress      how far a stage has come
compile       programmes in the engine's terms
overlapped    stock Megatron's interleaved stages
exchange      collectives
gathers       new weights that travel during first forward passes
shared_paths  replicas that share a path, priced by simulation
crowd         1F1B pipelines that share paths, in a compiled loop where there is one
pipeline      one pipeline by itself
relaxed       a lower bound for many divisions of the layers at once
timelines     what GPUs and paths do over a step
trace         timelines for ui.perfetto.dev
"""
