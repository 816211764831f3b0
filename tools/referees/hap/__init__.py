"""The program of a decoder layer on a group of unlike GPUs, synthesised with its shares (HAP).

states      states of tensors, collectives, and the rules of operators
layer       attention, MLP and a layer as operators, forward and backward
prices      seconds and bytes of a program at given shares
costed      these prices from the cost model
search      the fastest program at given shares, by A*
estimate    what is left of a program takes at least so long
shares      the best shares of a program, by a linear programme
synthesise  both in turn; the options of a group
forms       programs that the runtime executes, as stages and replicas
programs    the options of each stage of a plan
"""
