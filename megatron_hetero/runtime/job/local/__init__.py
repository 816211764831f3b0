"""A job as processes of this machine.

launch   the ranks of jobs side by side, until all have ended
jobs     such a job, the logs of its ranks, and its failure
ranks    ranks as forks of this process
loading  everything that a rank needs, before the first fork
folders  the folder for the files of a run
capacity memory that processes of a job may take
"""
