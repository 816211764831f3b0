"""Broken and hostile input for every reader, new in every run; `tools/fuzz.py` gives far more.

mutate        texts from sound ones and from bad ideas
readers       each reader with sound examples
plans         random plans, whole and damaged, to flags and launch files
words         hostile words in the places of names, paths and flags
watch         what a reader must never do: run, connect, write
"""
