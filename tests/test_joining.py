"""What nodes are called: the same in every run, and never two of one name."""

from raytune_eagle.nodes.joining import named


def node(identity, host="h", address="10.0.0.1", **labels):
    return {"NodeID": identity, "NodeManagerHostname": host, "NodeManagerAddress": address, "Labels": labels}


def ids(found):
    return {name: node["NodeID"] for name, node in found.items()}


def test_host_or_label():
    """A node goes by its host, or by its label, also where two are on one machine."""
    labelled = [node(name, **{"eagle-node": name}) for name in ("left", "right")]
    assert ids(named([node("a", host="g", address="10.0.0.2"), *labelled])) == {
        "g": "a",
        "left": "left",
        "right": "right",
    }


def test_cloned_machines_are_told_apart():
    """Machines that share a host's name have their address with it."""
    clones = [node("a"), node("b", address="10.0.0.2")]
    assert ids(named(clones)) == {"h@10.0.0.1": "a", "h@10.0.0.2": "b"}


def test_restarted_node_keeps_its_name():
    """While Ray still lists the dead one as alive, the one that is new is taken, under the old name."""
    for labels in ({}, {"eagle-node": "x"}):
        pair = [node("new", **labels), node("old", **labels)]
        for nodes in (pair, pair[::-1]):
            (found,) = ids(named(nodes, {"new": 0, "old": 1}.get)).values()
            assert found == "new"
