"""The model and the job: from scripts (`shell`), flags and config.json (`huggingface`).

spec             `Workload`, `ModelSpec`
training         `TrainingSpec`
unread           parts of a script that a plan does not have
load             a `Workload` from a script, flags or config.json
blocks           the model as blocks with parameters and FLOPs
megatron_flags   Megatron's flags to a `Workload`
training_flags   of these, the flags of the training
recompute        which modules of a layer are computed again
kinds_of_layers  flags of experts, dense layers among them, and latent attention
flag_reader      typed reading of flags, with the place of every refusal
flag_table       Megatron's flags as data, without torch
arguments        an argument vector as flags with values
attention_window the window of attention that flags set
tokenizer        vocabulary sizes that tokenizers say
launched         the command of a script that starts training
megatron_release the release of Megatron that the package follows
micro_batches    jobs whose objective depends on the size of a micro-batch
script           words that a bash script puts on the command line
"""
