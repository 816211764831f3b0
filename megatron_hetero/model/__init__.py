"""The model and the job to plan for, read from scripts (`shell`), flags and config.json.

spec                `Workload`, `ModelSpec`, `TrainingSpec`
load                a `Workload` from a script, flags or config.json
blocks              the model as blocks with parameters and FLOPs
megatron_flags      Megatron's flags to a `Workload`
kinds_of_layers     flags of experts, dense layers among them, and latent attention
flag_reader         typed reading of flags, with the place of every refusal
flag_table          Megatron's flags as data, without torch
arguments           an argument vector as flags with values
huggingface         config.json to Megatron flags
huggingface_config  keys of config.json, by family of models
huggingface_latent  config.json of models with latent attention
tokenizer           vocabulary sizes that tokenizers say
script              words that a bash script puts on the command line
"""
