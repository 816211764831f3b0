"""Faults of a running job: where each rank is, what is told when one stops, and drills.

progress    the phase that the training thread is in
marks       where a step stamps its phases
drill       faults on purpose, by rank, step and phase
watch       the thread of a rank that looks at the others; one message for all
others      who is dead, frozen or gone, or causes a stall
beat        what a rank publishes of itself
running     the watch of this process
store       stores for meetings and watches
unfinished  what a rank that hangs waits in
limits      how long a phase may last
place       what a rank is called
options     the flags of this folder and of saved checkpoints
"""
