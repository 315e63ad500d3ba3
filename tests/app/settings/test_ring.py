"""The settings of the ring: what may be typed, and what the engine is asked."""

from __future__ import annotations

import dataclasses
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings.fields import GIB, ItemError, ItemKind, SettingError, check_items, host_and_port
from app.settings.ring import node_id, open_network, ring_choice
from app.settings.schema import Settings, setting_named
from engine.ipc.messages import NetworkState, NodeId, PeerFacts

NETWORK = NetworkState(
    me=NodeId(node_id="a1" * 32, name="Laptop"), open=True,
    peers=[
        PeerFacts(node_id="b2" * 32, name="studio", state="ready"),
        PeerFacts(node_id="b3" * 32, name="mini", state="paired"),
        PeerFacts(node_id="c4" * 32),
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "kept"),
    [
        ("network", " 192.168.7.3/24 ,10.0.0.2,, fd00::/8", "192.168.7.0/24, 10.0.0.2, fd00::/8"),
        ("address", "studio.local:47820, [::1]:5 ,[fe80::1%en0]:6", "studio.local:47820, [::1]:5, [fe80::1%en0]:6"),
        ("machine", "studio, b3b3", "studio, b3b3"),
        ("share", "here=8,studio = 24.50", "here=8, studio=24.5"),
        ("share", "", ""),
    ],
)
def test_items_are_kept_in_their_usual_form(kind: ItemKind, text: str, kept: str) -> None:
    assert check_items(kind, text) == kept
    assert check_items(kind, kept) == kept


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("network", "192.168.7.0/33"), ("network", "studio"), ("address", "studio"), ("address", "studio:0"),
        ("address", "studio:65535"), ("address", ":47820"), ("address", "a b:1"), ("address", "::1:5"),
        ("address", "studio:٣"), ("share", "studio"), ("share", "=5"), ("share", "studio=nan"), ("share", "studio=-1"),
        ("machine", "a=b"), ("machine", "a\x1b[2J"), ("address", "x" * 400 + ":1"),
    ],
)  # fmt: skip
def test_what_is_no_item_is_refused(kind: ItemKind, text: str) -> None:
    with pytest.raises(ItemError):
        check_items(kind, text)


@given(st.sampled_from(get_args(ItemKind)), st.text(max_size=40))
def test_whatever_is_typed_is_kept_or_refused(kind: ItemKind, text: str) -> None:
    try:
        kept = check_items(kind, text)
    except ItemError:
        return
    assert check_items(kind, kept) == kept and kept.isprintable()


def test_a_port_leaves_room_for_the_link_listener() -> None:
    assert host_and_port("h:65534") == ("h", 65534)
    with pytest.raises(ValueError, match="h:65535"):
        host_and_port("h:65535")


def test_one_place_to_listen_at() -> None:
    setting = setting_named("ring_listen")
    assert setting.parse("127.0.0.1:0") == "127.0.0.1:0"
    assert setting.parse("") == "" and setting.parse("127.0.0.1:4000") == "127.0.0.1:4000"
    with pytest.raises(SettingError, match=r"ring_listen cannot be .*; it must be an address of this machine such as"):
        setting.parse("a:1, b:2")


def test_machines_are_named_by_name_by_id_and_as_here() -> None:
    assert node_id("STUDIO", NETWORK) == "b2" * 32
    assert node_id("b3", NETWORK) == "b3" * 32
    assert node_id("here", NETWORK) == node_id("laptop", NETWORK) == node_id("a1a1", NETWORK) == "a1" * 32
    with pytest.raises(SettingError, match="b names 2 machines"):
        node_id("b", NETWORK)
    with pytest.raises(SettingError, match="no paired machine is called attic; there are: studio, mini"):
        node_id("attic", NETWORK)
    with pytest.raises(SettingError, match="before the network is open"):
        node_id("studio", None)


def test_a_machine_is_found_by_the_name_it_had_and_by_one_that_it_shares() -> None:
    renamed = PeerFacts(node_id="b2" * 32, name="studio", former_name="VM", state="ready")
    network = msgspec.structs.replace(NETWORK, peers=[renamed])
    assert node_id("vm", network) == node_id("Studio", network) == "b2" * 32
    alike = [PeerFacts(node_id=one * 32, name=f"vm ({one * 4})", state="ready") for one in ("b2", "c3")]
    with pytest.raises(SettingError, match="VM names 2 machines; give the beginning of a node id that only one has"):
        node_id("VM", msgspec.structs.replace(NETWORK, peers=alike))
    assert node_id("vm (c3c3c3c3)", msgspec.structs.replace(NETWORK, peers=alike)) == "c3" * 32
    mine = msgspec.structs.replace(NETWORK, me=NodeId(node_id="a1" * 32, name="vm"), peers=alike[:1])
    with pytest.raises(
        SettingError, match="vm names 2 machines; give the beginning of a node id that only one has, or here"
    ):
        node_id("vm", mine)


def test_the_settings_become_what_the_engine_is_asked() -> None:
    settings = dataclasses.replace(
        Settings(), ring_mode="fast", ring_exchange="envoy", ring_loading="busy-full", ring_overlap=False,
        ring_even_if_slower=True, ring_nodes="studio", ring_shares="here=8, mini=0.5", ring_trusted="10.0.0.0/8",
        ring_peers="a:1, b:2", ring_name="attic", ring_listen="127.0.0.1:9",
    )  # fmt: skip
    choice = ring_choice(settings, NETWORK)
    assert msgspec.to_builtins(choice) == {
        "nodes": ["b2" * 32], "mode": "fast", "exchange": "envoy", "loading": "busy-full", "overlap": False,
        "shares": {"a1" * 32: 8 * GIB, "b3" * 32: GIB // 2}, "even_if_slower": True, "trusted": ["10.0.0.0/8"],
        "wait_s": None,
    }  # fmt: skip
    asked = open_network(settings, more_peers=("b:2", "c:3"), lend=settings.terms)
    assert (asked.name, asked.listen, asked.peers, asked.lend) == ("attic", "127.0.0.1:9", ["a:1", "b:2", "c:3"], True)


@pytest.mark.parametrize(("key", "value"), [("ring_nodes", "attic"), ("ring_shares", "attic=3")])
def test_a_setting_that_names_a_forgotten_machine_is_named(key: str, value: str) -> None:
    settings = Settings().with_value(key, value)
    label = setting_named(key).label
    with pytest.raises(SettingError, match=f"is called attic; .*; change the setting {label} .{key} in the settings"):
        ring_choice(settings, NETWORK)


def test_without_settings_nothing_is_asked_for() -> None:
    assert msgspec.to_builtins(ring_choice(Settings(), None)) == msgspec.to_builtins(Settings().load.ring)
    assert open_network(Settings()).peers == []
