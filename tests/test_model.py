"""Values: what a configuration is named by."""

from raytune_eagle.model.config import Config


def test_a_changed_copy_has_a_name_of_its_own():
    """Asking for the uid first must not make the copy inherit it."""
    config = Config(model="m", env={"NCCL_PROTO": "LL"})
    before = config.uid
    assert config.model_copy(update={"env": {}}).uid == Config(model="m").uid != before


def test_the_order_of_flags_does_not_name():
    """Launches that differ in the order of their flags and variables alone are one."""
    one = Config(model="m", args={"a": 1, "b": 2}, env={"A": "1", "B": "2"})
    other = Config(model="m", args={"b": 2, "a": 1}, env={"B": "2", "A": "1"})
    assert one.uid == other.uid
