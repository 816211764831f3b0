"""Conversion of text into the files that Megatron trains on.

command    `megatron-hetero data`
documents  documents of text files
encode     token numbers, written as an indexed data set
"""
