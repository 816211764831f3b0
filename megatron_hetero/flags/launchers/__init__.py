"""Launch files: one node script, and what starts it on every node of a plan.

Each launcher is a module of this folder with one function; all of them start `train.sh`, which
holds everything that does not depend on who starts it.
"""
