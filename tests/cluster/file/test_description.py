from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, cluster_json_schema, load_cluster
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Incast, Link, summarise_links
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.nvlink import with_collectives
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError, HeteroError

EXAMPLE = Path(__file__).parents[3] / "examples" / "a100-rtx4090" / "cluster.yaml"

FULL = """\
version: 1
gpu_types:
  MY-GPU: {memory: 24 GB, bf16: 120 TFLOPS, fp32: 30 TFLOPS, memory_bandwidth: 900 GB/s}
  4090: {memory: 48 GB}
nodes:
  - {name: a100-0, gpu: A100-40GB, count: 4, site: lab, host: a100-0.example}
  - {name: rtx-0, gpu: RTX-4090, count: 2, site: lab, link: {bandwidth: 25 GB/s, latency: 9 us}}
  - {name: mine, gpu: MY-GPU, count: 1, site: cloud}
  - {name: mine2, gpu: MY-GPU, count: 2, site: cloud}
links:
  inside_node:
    A100-40GB: {bandwidth: 600 GB/s, latency: 3 us}
    MY-GPU: {bandwidth: 10 GB/s, latency: 20 us}
  between_nodes:
    lab: {bandwidth: 25 Gb/s, latency: 20 us}
    cloud: {bandwidth: 10 Gb/s, latency: 50 us}
  between_sites:
    - {sites: [lab, cloud], bandwidth: 1 Gb/s, latency: 8 ms}
  measured:
    - {nodes: [rtx-0, a100-0], bandwidth: 2.9 GB/s, latency: 18 us}
limits:
  max_tensor_parallel: 4
  max_pipeline_parallel: 6
  num_replicas: 2
  idle: ["rtx-0:1", mine]
  first_stage: [a100-0]
  last_stage: [mine2]
  no_tensor_parallel_across: [rtx-0]
  no_data_parallel_across_sites: true
  memory_reserve: 2 GiB
""".replace("900 GB/s}", "900 GB/s, library: NCCL}").replace("4090: {", '"4090": {')


def _load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize("price", ["true", '"3"', '"1_0"'])
def test_what_is_no_number_is_no_price(price: str, tmp_path: Path) -> None:
    """Neither is one in the JSON Schema, by which an editor checks the file."""
    wrong = FULL.replace("host: a100-0.example}", f"price_per_hour: {price}}}")
    with pytest.raises(
        ClusterError, match=r":6: nodes\[0\].price_per_hour: .* valid number; it is"
    ):
        _load(tmp_path, wrong)
    with pytest.raises(ClusterError, match=r"incast.slowdown: .* valid number"):
        _load(
            tmp_path, FULL.replace("50 us}", f"50 us, incast: {{senders: 1, slowdown: {price}}}}}")
        )


def test_the_whole_schema(tmp_path: Path) -> None:
    cluster = _load(tmp_path, FULL)
    assert [n.name for n in cluster.nodes] == ["a100-0", "rtx-0", "mine", "mine2"]
    assert [n.host for n in cluster.nodes] == ["a100-0.example", "rtx-0", "mine", "mine2"]
    assert [n.site for n in cluster.nodes] == ["lab", "lab", "cloud", "cloud"]
    assert [n.link for n in cluster.nodes] == [
        with_collectives(Link(600e9, 3e-6), "A100-40GB"),
        Link(25e9, 9e-6),
        Link(10e9, 2e-5),
        Link(10e9, 2e-5),
    ]
    assert len(cluster.devices) == 9
    assert cluster.link(Device("a100-0", 0), Device("rtx-0", 1)) == Link(2.9e9, 18e-6)
    assert cluster.link(Device("rtx-0", 1), Device("a100-0", 0)) == Link(2.9e9, 18e-6)
    assert cluster.link(Device("mine", 0), Device("mine2", 1)) == Link(1.25e9, 50e-6)
    assert cluster.link(Device("mine", 0), Device("a100-0", 1)) == Link(125e6, 8e-3)
    assert len(cluster.node_links) == 12
    assert cluster.limits == Limits(
        max_tensor_parallel=4,
        max_pipeline_parallel=6,
        num_replicas=2,
        idle_devices=("rtx-0:1", "mine"),
        first_stage_nodes=("a100-0",),
        last_stage_nodes=("mine2",),
        no_tensor_parallel_across=("nodes", "rtx-0"),
        no_data_parallel_across_sites=True,
        memory_reserve_bytes=2 << 30,
    )


def test_own_and_corrected_gpu_types(tmp_path: Path) -> None:
    cluster = _load(tmp_path, FULL)
    rtx, mine = cluster.nodes[1].gpu_type, cluster.nodes[2].gpu_type
    assert (rtx.name, rtx.memory_bytes) == ("RTX-4090", 48 * 10**9)
    assert rtx.peak_flops["bf16"] == 165.2e12 and rtx.compute_capability == "8.9"
    assert rtx.source.endswith("cluster.yaml:4")
    assert mine.peak_flops == {"bf16": 120e12, "fp16": None, "fp32": 30e12, "fp8": None}
    assert (mine.memory_bytes_per_s, mine.compute_capability) == (900e9, None)


def test_defaults_forbid_tensor_parallel_across_nodes(tmp_path: Path) -> None:
    cluster = _load(tmp_path, "version: 1\nnodes: [{name: a, gpu: T4, count: 1}]\n")
    assert cluster.limits == Limits()
    assert cluster.nodes[0].site == "main"
    allowed = _load(
        tmp_path,
        "version: 1\nnodes: [{name: a, gpu: T4, count: 1}]\n"
        "limits: {no_tensor_parallel_across: []}\n",
    )
    assert allowed.limits.no_tensor_parallel_across == ()


def test_the_example_is_a_cluster() -> None:
    cluster = load_cluster(EXAMPLE)
    assert [(n.gpu_type.name, n.num_gpus) for n in cluster.nodes] == [
        ("A100-80GB", 1), ("RTX-4090", 4),
    ]  # fmt: skip
    assert cluster.limits.memory_reserve_bytes is None


def _replaced(old: str, new: str) -> str:
    assert old in FULL
    return FULL.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nnodes: []", "cluster.yaml:1: version: "),
        ("version: true\nnodes: []", "cluster.yaml:1: version: input should be 1; it is true"),
        (_replaced("count: 4", "cuont: 4"), ':6: nodes[0].cuont: unknown key "cuont"'),
        (_replaced("count: 4", "count: 65"), ":6: nodes[0].count: input should be less than"),
        (_replaced("count: 4", "count: 0"), ":6: nodes[0].count: input should be greater than"),
        (_replaced("count: 4", "count: true"), ":6: nodes[0].count: input should be a valid int"),
        (
            _replaced("25 Gb/s", "25"),
            ":15: links.between_nodes.lab.bandwidth: 25 is not a bandwidth with a unit",
        ),
        (_replaced("25 Gb/s", "'25'"), '"25" is a bandwidth without a unit; "b" is a bit'),
        (_replaced("600 GB/s", "600 GB"), '"GB" is not a unit of bandwidth'),
        (
            _replaced("3 us}", "3 us, reduce_bandwidth: 300 GB}"),
            ':12: links.inside_node.A100-40GB.reduce_bandwidth: "300 GB": "GB" is not a unit of',
        ),
        (_replaced("3 us}", "3 us, reduce_bandwidth: 0 GB/s}"), "above 0 and at most 10 TB/s"),
        (
            _replaced("3 us}", "3 us, groups: [{size: 4, bandwidth: 9 TB/s}]}"),
            "groups: a ring of 4 cannot have 9 TB/s where a pair has 600 GB/s",
        ),
        (
            _replaced("3 us}", "3 us, groups: [{size: 2, bandwidth: 1 GB/s}]}"),
            "groups[0].size: input should be greater than or equal to 3",
        ),
        (
            _replaced(
                "3 us}",
                "3 us, groups: [{size: 4, bandwidth: 1 GB/s}, {size: 4, bandwidth: 1 GB/s}]}",
            ),
            "a size of ring is given twice",
        ),
        (
            _replaced("3 us}", "3 us, incast: {senders: 0, slowdown: 1}}"),
            ":12: links.inside_node.A100-40GB.incast.senders: input should be greater than or equ",
        ),
        (_replaced("3 us}", "3 us, incast: {senders: 1.5, slowdown: 1}}"), "be a valid integer"),
        (
            _replaced("3 us}", "3 us, incast: {senders: 1, slowdown: -0.1}}"),
            "incast.slowdown: input should be greater than or equal to 0",
        ),
        (_replaced("3 us}", "3 us, incast: {senders: 1, slowdown: 101}}"), "or equal to 100"),
        (_replaced("3 us}", "3 us, incast: {senders: 1}}"), 'the key "slowdown" is missing'),
        (
            _replaced("3 us}", "3 us, incast: {flows: 1, slowdown: 1}}"),
            'incast.flows: unknown key "flows"',
        ),
        (
            _replaced("    A100-40GB: {bandwidth", "    bandwidth: 1 GB/s\n    X: {bandwidth"),
            "links.inside_node: has one link for each GPU type, with its name before it",
        ),
        (_replaced("3 us}", "3 us, incast: 8}"), ":12: links.inside_node.A100-40GB.incast: "),
        (_replaced("latency: 3 us", "latency: 3"), "3 is not a duration with a unit"),
        (_replaced("A100-40GB, count", "A100-4GB, count"), 'did you mean "A100-40GB"'),
        (_replaced("gpu: MY-GPU, count: 1", "gpu: MYGPU, count: 1"), 'did you mean "MY-GPU"?'),
        (_replaced("name: rtx-0", "name: -oProxyCommand=x"), "is not a host name"),
        (_replaced("a100-0.example", "a..b"), '"a..b" is not a host name'),
        (_replaced("name: rtx-0", "name: A100-0"), "also the name of nodes[0]"),
        (_replaced("name: mine2", "name: nodes"), 'a node cannot be called "nodes"'),
        (_replaced("sites: [lab, cloud]", "sites: [lab, clout]"), 'did you mean "cloud"?'),
        (_replaced("sites: [lab, cloud]", "sites: [lab, lab]"), '"lab" stands here twice'),
        (_replaced("sites: [lab, cloud]", "sites: [lab]"), "needs 2 or more entries"),
        (_replaced("sites: [lab, cloud]", "sites: [lab, cloud, lab]"), '"lab" stands here twice'),
        (
            _replaced("nodes: [rtx-0, a100-0]", "nodes: [rtx-0, a100-1]"),
            ':20: links.measured[0].nodes[1]: there is no node "a100-1" (did you mean "a100-0"?)',
        ),
        (
            _replaced(
                "limits:",
                "    - {nodes: [a100-0, rtx-0], bandwidth: 1 GB/s, latency: 1 us}\nlimits:",
            ),
            ':21: links.measured[1].nodes: {"a100-0", "rtx-0"} is measured[0] already',
        ),
        (_replaced("    MY-GPU: {b", "    X: {b"), '"X" is not a GPU of the catalogue'),
        (_replaced("    MY-GPU: {b", "    A100-40: {b"), "A100-40GB has a link already"),
        (
            _replaced("    MY-GPU: {bandwidth: 10 GB/s, latency: 20 us}\n", ""),
            ':9: nodes[3]: node "mine2" has 2 GPUs and no link between them; add '
            "links.inside_node.MY-GPU",
        ),
        (
            _replaced(
                "    - {sites: [lab, cloud], bandwidth: 1 Gb/s, latency: 8 ms}\n", "    []\n"
            ),
            'the cluster is not connected: no link joins {"a100-0", "rtx-0"} with {"mine", '
            '"mine2"}; add links.between_sites (sites: [lab, cloud])',
        ),
        (
            _replaced("    cloud: {bandwidth: 10 Gb/s, latency: 50 us}\n", ""),
            'no link joins "mine" with "mine2"; add links.between_nodes (site cloud)',
        ),
        (_replaced("    lab: {b", "    lap: {b"), 'there is no site "lap" (did you mean "lab"?)'),
        (_replaced('"rtx-0:1"', '"rtx-0:2"'), 'there is no GPU "rtx-0:2"; there is rtx-0:0 to rtx'),
        (_replaced('"rtx-0:1"', '"rtx-1:1"'), ':25: limits.idle[0]: there is no node "rtx-1"'),
        (_replaced('"rtx-0:1"', "a100-0, rtx-0, mine2"), "every GPU is idle"),
        (_replaced("first_stage: [a100-0]", "first_stage: [a]"), 'there is no node "a"'),
        (_replaced("last_stage: [mine2]", "last_stage: [mine3]"), 'there is no node "mine3"'),
        (_replaced("across: [rtx-0]", "across: [node]"), 'did you mean "nodes"?'),
        (_replaced("max_tensor_parallel: 4", "max_tensor_parallel: 0"), "greater than or equal"),
        (_replaced("memory: 24 GB, ", ""), ':3: gpu_types.MY-GPU: the key "memory" is missing'),
        (_replaced("bf16: 120 TFLOPS, fp32: 30 TFLOPS, ", ""), "no peak is given"),
        (
            _replaced("gpu_types:", "gpu_types:\n  RTX 4090: {memory: 1 GB}"),
            ":5: gpu_types.4090: RTX-4090 is described above already",
        ),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError) as error:
        _load(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "cluster.yaml") + ":")
    assert message in str(error.value)
    assert error.value.exit_code == 4


def test_two_nodes_on_one_host_are_one_machine(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r'host "a100-0\.example" too; a machine with cards of'):
        _load(tmp_path, _replaced("count: 2, site: lab,", "count: 2, host: a100-0.example,"))


def test_the_hash_is_of_the_meaning(tmp_path: Path) -> None:
    reference = cluster_hash(_load(tmp_path, FULL))
    same = FULL.replace("25 Gb/s", "3.125 GB/s").replace("8 ms", "8000 us")
    same = same.replace('["rtx-0:1", mine]', '[mine, "rtx-0:1"]').replace("1\n", "1 # comment\n", 1)
    assert cluster_hash(_load(tmp_path, same)) == reference
    lines = FULL.splitlines(keepends=True)
    nodes = lines[5:9]
    random.Random(0).shuffle(nodes)
    assert cluster_hash(_load(tmp_path, "".join(lines[:5] + nodes + lines[9:]))) == reference


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count: 4", "count: 3"),
        ("10 Gb/s", "11 Gb/s"),
        ("2.9 GB/s", "2.8 GB/s"),
        ("site: lab, host: a100-0.example", "site: lab"),
        ("memory: 48 GB", "memory: 47 GB"),
        ("max_tensor_parallel: 4", "max_tensor_parallel: 2"),
        ("memory_reserve: 2 GiB", "memory_reserve: 1 GiB"),
        ("no_data_parallel_across_sites: true", "no_data_parallel_across_sites: false"),
    ],
)
def test_the_hash_changes_with_the_meaning(tmp_path: Path, old: str, new: str) -> None:
    assert cluster_hash(_load(tmp_path, FULL)) != cluster_hash(_load(tmp_path, _replaced(old, new)))


def test_random_damage_is_a_typed_error(tmp_path: Path) -> None:
    generator = random.Random(1)
    for _ in range(150):
        text = list(FULL)
        for _ in range(generator.randint(1, 4)):
            position = generator.randrange(len(text))
            text[position] = generator.choice("{}[]:,-0aZ \n\"'&*")
        try:
            assert _load(tmp_path, "".join(text)).devices
        except HeteroError as error:
            assert "cluster.yaml:" in str(error)


def test_the_json_schema_names_every_section() -> None:
    schema = cluster_json_schema()
    assert set(schema["properties"]) == {
        "version", "gpu_types", "nodes", "sites", "links", "limits",
    }  # fmt: skip
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["version", "nodes"]
    bandwidth = schema["$defs"]["LinkSection"]["properties"]["bandwidth"]
    assert bandwidth["type"] == "string" and bandwidth["examples"] == ["25 Gb/s"]


@pytest.mark.parametrize(("price_of_b", "is_counted"), [("", True), (", price_per_hour: 4", False)])
def test_a_price_that_no_machine_takes_is_said_with_its_place(
    price_of_b: str, is_counted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "version: 1\nnodes:\n"
        "  - {name: a, gpu: T4, count: 1, price_per_hour: 3}\n"
        f"  - {{name: b, gpu: T4, count: 1{price_of_b}}}\n"
        "gpu_types:\n  T4: {price_per_hour: 0.35}\n"
        "links: {between_nodes: {bandwidth: 1 GB/s, latency: 9 us}}\n"
    )
    doubts = load_cluster(path).doubts
    assert len(doubts) == (not is_counted)
    if not is_counted:
        where = "cluster.yaml:6: gpu_types.T4.price_per_hour: every machine with these GPUs has"
        assert where in str(doubts[0])


def test_prices_are_read_and_count_in_the_hash(tmp_path: Path) -> None:
    text = (
        "version: 1\n"
        "nodes:\n"
        "  - {name: a, gpu: T4, count: 2, site: west, price_per_hour: 3}\n"
        "  - {name: b, gpu: T4, count: 1, site: east}\n"
        "gpu_types:\n"
        "  T4: {price_per_hour: 0.35}\n"
        "links:\n"
        "  inside_node: {T4: {bandwidth: 10 GB/s, latency: 10 us}}\n"
        "  between_sites:\n"
        "    - {sites: [west, east], bandwidth: 1 Gb/s, latency: 9 ms, price_per_gb: 0.02}\n"
        "limits: {max_price_per_hour: 5}\n"
    )
    cluster = _load(tmp_path, text)
    assert [(n.price_per_hour, n.gpu_price_per_hour) for n in cluster.nodes] == [
        (3.0, 0.35),
        (None, 0.35),
    ]
    assert cluster.prices_per_gb == {("west", "east"): 0.02, ("east", "west"): 0.02}
    assert cluster.limits.max_price_per_hour == 5
    for old in ("price_per_hour: 3}", "0.35", "0.02", "max_price_per_hour: 5"):
        other = _load(
            tmp_path, text.replace(old, old.replace("3", "4").replace("2", "6").replace("5", "7"))
        )
        assert cluster_hash(other) != cluster_hash(cluster)


def test_bandwidths_of_groups_are_read_and_count_in_the_hash(tmp_path: Path) -> None:
    given = "groups: [{size: 8, bandwidth: 0.5 GB/s}, {size: 4, bandwidth: 1 GB/s}]"
    cluster = _load(tmp_path, _replaced("50 us}", f"50 us, {given}}}"))
    link = cluster.node_links["mine", "mine2"]
    assert link == Link(1.25e9, 50e-6, group_bytes_per_s=((4, 1e9), (8, 0.5e9)))
    assert link.times_as_fast(2).ring_bytes_per_s(9) == 1e9
    assert cluster_hash(cluster) != cluster_hash(_load(tmp_path, FULL))


def test_link_terms_are_read_and_count_in_the_hash_where_there_are_some(tmp_path: Path) -> None:
    hashes = {cluster_hash(_load(tmp_path, FULL))}
    for terms, link in (
        ("reduce_bandwidth: 300 GB/s", Link(1.25e9, 50e-6, reduce_bytes_per_s=300e9)),
        ("incast: {senders: 8, slowdown: 1}", Link(1.25e9, 50e-6, incast=Incast(8, 1.0))),
        ("incast: {senders: 8, slowdown: 0.02}", Link(1.25e9, 50e-6, incast=Incast(8, 0.02))),
        ("incast: {senders: 7, slowdown: 0.02}", Link(1.25e9, 50e-6, incast=Incast(7, 0.02))),
    ):
        cluster = _load(tmp_path, _replaced("50 us}", f"50 us, {terms}}}"))
        assert cluster.node_links["mine", "mine2"] == link
        assert cluster.without_link_terms.node_links["mine", "mine2"] == Link(1.25e9, 50e-6)
        hashes.add(cluster_hash(cluster))
    assert len(hashes) == 5
    plain = _load(tmp_path, FULL)
    assert plain.without_link_terms is plain
    harmless = _load(tmp_path, _replaced("50 us}", "50 us, incast: {senders: 8, slowdown: 0}}"))
    assert cluster_hash(harmless) == cluster_hash(plain)


def test_the_link_that_most_pairs_have_does_not_depend_on_the_order_of_the_file() -> None:
    """Of two that only their terms tell apart, as many pairs each."""
    sites = dict.fromkeys("abc", "here")
    plain, slow = Link(1e9, 1e-3), Link(1e9, 1e-3, reduce_bytes_per_s=1e9)
    links = {(a, b): plain if a < b else slow for a in sites for b in sites if a != b}
    backwards = dict(reversed(links.items()))
    assert summarise_links(sites, links) == summarise_links(sites, backwards)


def test_jitter_is_read_and_counts_in_the_hash_where_there_is_some(tmp_path: Path) -> None:
    plain = _load(tmp_path, FULL)
    late = _load(tmp_path, FULL.replace("latency: 8 ms}", "latency: 8 ms, jitter: 5 ms}"))
    none = _load(tmp_path, FULL.replace("latency: 8 ms}", "latency: 8 ms, jitter: 0 ms}"))
    assert late.link(Device("mine", 0), Device("a100-0", 1)) == Link(125e6, 8e-3, 5e-3)
    assert cluster_hash(none) == cluster_hash(plain) != cluster_hash(late)
