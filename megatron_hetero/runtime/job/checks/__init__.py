"""Refusals before a job starts: its flags, its machine and the packages that it needs.

support        refusals by the name of the flag, before any process group exists
refused_flags  flags refused on asymmetric plans, each with the advice
entry_flags    flags refused by the training entry under any plan
needs          packages and partners that flags need
attention_variables  Transformer Engine's variables beside `--attention-backend`
machine        the process against the place and the model of the plan
bus            cards by their places on the PCI bus
flexible_sequences  flags that documents dealt to groups cannot follow yet
"""
