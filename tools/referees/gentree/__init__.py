"""GenTree: exchanges generated for a tree of links, beside the exchanges that jobs run.

generate  plans made for a tree, and the choice among all
least     a bound by bytes alone
"""
