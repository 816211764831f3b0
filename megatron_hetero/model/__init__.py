"""What is trained, read from what people have: scripts, flags, Hugging Face configurations.

spec              `Workload`, `ModelSpec`, `TrainingSpec`
load              a `Workload` from a script, flags or config.json
blocks            the model as blocks with parameters and FLOPs
megatron_flags    Megatron's flags to a `Workload`
flag_reader       typed reading of flags, with the place of every refusal
arguments         an argument vector as flags with values
huggingface       config.json to Megatron flags
tokenizer         vocabulary sizes that tokenizers say
script            words that a bash script puts on the command line
shell_lexer       bash text to words
shell_conditions  branches of `if` that the text decides
"""
