"""First cluster files from lists that schedulers and machines give.

draft       machines, cards and links of a file to be, with guesses
text        the text of a first cluster.yaml
cards       cards of machines with several types
nics        NICs of a machine, and which GPUs are near each
slurm       `scontrol show nodes`
kubernetes  `kubectl get nodes -o json`
skypilot    SkyPilot task files
remote      machines that ssh reaches
"""
