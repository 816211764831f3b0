"""The contract between planner and runtime: the frozen `Plan`.

plan           `Plan`, `Layout` and their parts
estimates      the planner's predictions, as a plan carries them
file           plan.json
layout         the one-line form
build          plans from layouts and from replicas on devices
hosts          machines of a launch, in rank order
place          devices for a plan that names none
ranks          which global rank is which place
stock_ranks    Megatron's two orders of ranks
chunks         the chain of model chunks of a replica
in_flight      micro-batches that a stage holds at most
precision      what stages compute in, and what crosses between them
order          the text form of a stage's computations
diff           what differs between two plans
checks         the invariants of a plan, a function for each
communication  libraries of machines, and sets of ranks that make a communicator together
sharding       pieces of tensors, groups of experts, shares of sequences
"""
