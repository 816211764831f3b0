"""Launch files: one node script, and what starts it on every node of a plan.

job          what every launcher is given
node_script  `train.sh`, the same on every node
install      `install.sh`, from the project's wheel
replanning   goes on without lost machines
running      status, logs and stop by the launcher's own tools
torchrun     by hand
ssh          one script for all nodes
slurm        a heterogeneous job
kubernetes   a JobSet
skypilot     a task for each kind of node
"""
