"""Links as classes: equal to the table of all pairs, and to its summary."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import cluster_hash
from megatron_hetero.cluster.node_links import Link, NodeLinks, mapped_links, summarise_links
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster

LINKS = st.sampled_from([Link(1e9, 1e-3), Link(2e9, 1e-3), Link(2e9, 1e-4)])


@st.composite
def node_links(draw: st.DrawFn) -> NodeLinks:
    """A few nodes on a few sites; some pairs, in both or one direction, have a link of their own,
    and classes may be missing where all pairs do."""
    sites = {f"n{i}": f"s{draw(st.integers(0, 2))}" for i in range(draw(st.integers(1, 6)))}
    site_links = {pair: draw(LINKS) for pair in product(sorted(set(sites.values())), repeat=2)}
    pairs = [(a, b) for a, b in product(sites, sites) if a != b]
    own = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    if draw(st.booleans()):
        missing = draw(st.sampled_from(sorted(site_links)))
        del site_links[missing]
        own = [*own, *(p for p in pairs if (sites[p[0]], sites[p[1]]) == missing and p not in own)]
    return NodeLinks(sites, site_links, {pair: draw(LINKS) for pair in own})


@given(node_links())
def test_every_pair_has_its_link_however_it_is_given(links: NodeLinks) -> None:
    table = {
        (a, b): links.pair_links.get((a, b)) or links.site_links[links.sites[a], links.sites[b]]
        for a, b in product(links.sites, links.sites)
        if a != b
    }
    assert dict(links) == table
    assert len(links) == len(table)
    assert ("n0", "n0") not in links
    assert ("n0", "elsewhere") not in links


@given(node_links())
def test_the_summary_says_every_link_and_does_not_depend_on_the_form(links: NodeLinks) -> None:
    summary = summarise_links(links.sites, links)
    assert summary == summarise_links(links.sites, dict(links))
    for (a, b), link in links.items():
        usual = summary.usual[links.sites[a], links.sites[b]]
        assert summary.others.get((a, b), usual) == link
    speeds = [link.bytes_per_s for link in links.values()]
    assert summary.fastest_bytes_per_s == max(speeds, default=None)
    # The usual link is the one that most pairs have, so that the others are few.
    for block in summary.usual:
        pairs = [p for p in links if (links.sites[p[0]], links.sites[p[1]]) == block]
        others = [p for p in pairs if p in summary.others]
        count = max(sum(links[p] == link for p in pairs) for link in set(links.values()))
        assert len(pairs) - len(others) == count


@given(node_links(), st.data())
def test_the_hash_sees_every_link_and_no_form(links: NodeLinks, data: st.DataObject) -> None:
    t4 = gpu_type("T4")
    nodes = tuple(
        Node(name, t4, 1, site, name, Link(1e9, 0.0)) for name, site in links.sites.items()
    )
    cluster = Cluster(nodes, links)
    assert cluster_hash(cluster) == cluster_hash(Cluster(nodes, dict(links)))
    if len(links):
        changed = dict(links)
        changed[data.draw(st.sampled_from(sorted(links)))] = Link(3e9, 0.0)
        assert cluster_hash(cluster) != cluster_hash(replace(cluster, node_links=changed))


@given(node_links())
def test_all_links_change_alike_in_both_forms(links: NodeLinks) -> None:
    def faster(link: Link) -> Link:
        return Link(3 * link.bytes_per_s, link.latency_s)

    assert dict(mapped_links(links, faster)) == mapped_links(dict(links), faster)
