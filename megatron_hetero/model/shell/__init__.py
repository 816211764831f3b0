"""Launch scripts in bash, read as text and never run.

words       commands, words and the parts of words
lexer       bash text to commands
values      expanded words, known or in part unknown
arithmetic  `$((...))` over known whole numbers
conditions  branches of `if` that the text decides
"""
