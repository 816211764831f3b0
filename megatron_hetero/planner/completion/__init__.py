"""From a structure of stages to a placement: settings of its stages and replicas.

completer         a structure completed with all settings
pipelines         one replica of it: options and layers of its stages, from cached tables
like_chains       which replicas are completed alike
tables            what a completer knows of stages, of one micro-batch size
filled            the stages of one replica, or of all, completed
tuner             layers and launch counts by the recurrence
own_flags         single replicas as the job's flags say, for seeds and repairs
stage_options     the fastest option of a stage for each number of layers
stage_places      stages without their layers, and which are alike
stage_lines       seconds and bytes of a stage as straight lines
optimizer_shares  shares of the optimizer's states by free memory
dealt             experts over alike replicas, and blocks that do the same micro-batches
sharded           layers whose weights the replicas divide
unlike_sizes      unlike micro-batch sizes of the replicas
"""
