"""Launch scripts in bash, read as text and never run.

words       commands, words and the parts of words
lexer       bash text to commands
conditions  branches of `if` that the text decides
"""
