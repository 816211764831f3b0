"""`megatron-hetero rehearse`: run a plan for real on this machine, as slowly as its GPUs would.
Rooms: `links` (messages and collectives, held to the links of the cluster), `dealt` (steps of
sequences of unlike length).

command      options in, data out, behind the command line
run          the processes, started, and their records, gathered
capacity     how many ranks a machine can rehearse
rank         one process of Megatron's own training, stretched and held to the links
pace         steps, their time scale, and the steps that count
clock        computations that take as long as on the GPU that they stand for
small        a small model: layers with equal holders become one layer
exchange     the exchange of gradients and new weights
interleaved  passes and messages of stock Megatron's interleaved schedule
progress     progress for the terminal, written by rank 0
rehearsal    seen times beside predicted times
"""
