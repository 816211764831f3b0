"""Launch scripts in bash, followed as text and never run.

tree          bash text to the tree of its grammar, by tree-sitter
values        expanded words, known or in part unknown
state         variables, arguments and what the script starts; ways that are merged
expansion     words of the tree to words of a command line
fields        values cut into words, and words joined, where a word may be none
merging       values that branches make, merged
lookup        variables, arguments and elements, and numbers made of them
parameters    `${X...}` and its operators
patterns      `*`, `?` and `[a-z]` as regular expressions
arithmetic    `$((...))` over known whole numbers
conditions    `[[ ]]` and `[ ]` that the text decides
follow        statements one after another
groups        `{ }`, subshells, pipelines, redirections
branches      `if`, `case`, `!`, `&&` and `||`
loops         as many runs as the text decides
statements    kinds of statements, each with what follows it
assignments   `NAME=value`, arrays and their elements
declarations  `export`, `declare`, `local`, `unset`
commands      calls of functions, and what is started
builtins      `echo`, `read`, `shift`, `set`, ...
code          functions, `eval`, `bash -c` and sourced files
substitution  `$(...)` whose output the text says
names         variables that a piece of a script may set
"""
