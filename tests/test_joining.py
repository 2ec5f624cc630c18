"""What nodes are called: the same in every run, and never two of one name."""

from raytune_eagle.nodes.joining import named


def node(identity, host="h", address="10.0.0.1", port=1, **labels):
    return {
        "NodeID": identity,
        "NodeManagerHostname": host,
        "NodeManagerAddress": address,
        "NodeManagerPort": port,
        "Labels": labels,
    }


def ids(found):
    return {name: node["NodeID"] for name, node in found.items()}


def test_host_or_label():
    """A node goes by its host, or by its label."""
    labelled = node("b", address="10.0.0.2", **{"eagle-node": "left"})
    assert ids(named([node("a"), labelled])) == {"h": "a", "left": "b"}


def test_cloned_machines_are_told_apart():
    """Machines that share a host's name have their address with it, two Rays on one machine their port."""
    clones = [node("a"), node("b", address="10.0.0.2"), node("c", address="10.0.0.2", port=2)]
    assert ids(named(clones)) == {"h@10.0.0.1": "a", "h@10.0.0.2:1": "b", "h@10.0.0.2:2": "c"}


def test_rebooted_machine_keeps_its_name():
    """While Ray still lists the old one as alive, the one that is new is taken, under the old name."""
    assert ids(named([node("new"), node("old")], known={"old"})) == {"h": "new"}
    assert ids(named([node("old"), node("new")], known={"old"})) == {"h": "new"}
