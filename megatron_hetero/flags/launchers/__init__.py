"""Launch files: one node script, and what starts it on every node of a plan.

job          what every launcher is given
node_script  `train.sh`, the same on every node
install      `install.sh`, from the project's wheel
replanning   goes on without lost machines
launcher     a launcher as data
registry     the launchers that `launch --for` knows
kept         the number of a job that a start script has kept
running      status, logs and stop by the launcher's own tools
torchrun     by hand
ssh          one script for all nodes
batch        what batch systems share: options, and the script that submits a job
slurm        a heterogeneous job
pbs          a job with a chunk for each node
pod          pods of Kubernetes
kubernetes   a JobSet
pytorchjob   a PyTorchJob of Kubeflow
skypilot     a task for each kind of node
sky_tasks    a task of the user's, taken over
sky_names    SkyPilot's names of GPUs
"""
