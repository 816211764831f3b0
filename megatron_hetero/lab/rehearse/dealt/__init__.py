"""`megatron-hetero rehearse --sequences`: dealt steps, really run, as slowly as their GPUs would.

command  options in, data out, behind the command line
run      the processes, started, and their records, gathered
rank     one process of the training of dealt steps, stretched
"""
