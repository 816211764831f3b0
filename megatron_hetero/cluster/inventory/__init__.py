"""First cluster files from what machines, schedulers and measurements say.

draft         machines, cards and links of a file to be, with guesses
text          the text of a first cluster.yaml
discovery     the GPUs of a machine, as its driver lists them
topology      paths between its GPUs and NICs, from `nvidia-smi topo -m`
card_names    names of cards in a list, and those to ask for
cards         its cards, where there are several types
nics          its NICs, and which GPUs are near each
measurements  logs of nccl-tests
remote        machines that ssh reaches
slurm         `scontrol show nodes`
kubernetes    `kubectl get nodes -o json`
skypilot      SkyPilot task files
"""
