"""Launch scripts in bash, followed as text and never run.

tree          bash text to the tree of its grammar, by tree-sitter
values        expanded words, known or in part unknown
fields        values cut into words, and words joined, where a word may be none
held          variables, and the records that all copies of a shell share
merging       values that branches make, merged
state         a shell at a place of its script
ways          shells of several ways, merged
scopes        local variables, and `unset`
expansion     words of the tree to pieces, each with its quotes
splitting     words of the tree to words of a command line
lookup        variables, arguments and elements, and numbers made of them
defaults      `${X:-a}` and the like
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
builtins      `cd`, `shift`, `exit`, ...
reading       `read` and `mapfile`
options       `set`, `shopt` and `trap`
printing      `echo` and `printf`
redirections  what commands read, and files that they write
code          functions, `eval` and sourced files
children      `bash -c`, `bash <<EOF`, scripts that are started
passing       variables that a launcher hands to what it starts
substitution  `$(...)` whose output the text says
names         variables that a piece of a script may set
"""
