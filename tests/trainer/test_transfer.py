"""Weight movement over TCP."""

import json
import socket
import threading

import numpy as np
import pytest
from gyre_trainer.errors import TransferError, VersionError
from gyre_trainer.transfer import TcpTransfer
from gyre_trainer.wire import Channel
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

KEY = b"k" * 32


@pytest.fixture
def ends():
    core, satellite = TcpTransfer(KEY, timeout_s=2.0), TcpTransfer(KEY, timeout_s=2.0)
    yield core, satellite
    core.close()
    satellite.close()


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(300, 400)).astype(np.float32), "b": rng.normal(size=7).astype(np.float32)}


def empty(like):
    return {name: np.zeros_like(array) for name, array in like.items()}


def test_a_pull_copies_every_buffer(ends):
    core, satellite = ends
    source, target = weights(), empty(weights())
    core.expose(3, source)
    satellite.pull(core.address, 3, target)
    assert all(np.array_equal(source[name], target[name]) for name in source)


def test_several_satellites_pull_at_once(ends):
    core, satellite = ends
    source = weights()
    core.expose(1, source)
    targets = [empty(source) for _ in range(4)]
    threads = [threading.Thread(target=satellite.pull, args=(core.address, 1, t)) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(np.array_equal(source[name], target[name]) for target in targets for name in source)


def test_another_version_is_refused(ends):
    core, satellite = ends
    core.expose(2, weights())
    with pytest.raises(VersionError, match="at version 2, not at 3"):
        satellite.pull(core.address, 3, empty(weights()))


@pytest.mark.parametrize(
    "target",
    [
        {"a": np.zeros((300, 400), np.float32)},
        {"a": np.zeros((400, 300), np.float32), "b": np.zeros(7, np.float32)},
        {"a": np.zeros((300, 400), np.float32), "b": np.zeros(7, np.float16)},
    ],
)
def test_other_names_shapes_or_dtypes_are_refused(ends, target):
    core, satellite = ends
    core.expose(0, weights())
    with pytest.raises(TransferError, match="differ in name, shape or dtype"):
        satellite.pull(core.address, 0, target)


def test_nothing_is_given_before_exposing_or_after_withdrawing(ends):
    core, satellite = ends
    with pytest.raises(TransferError, match="nothing is exposed"):
        satellite.pull(core.address, 0, {})
    core.expose(0, weights())
    core.withdraw()
    with pytest.raises(TransferError, match="nothing is exposed"):
        satellite.pull(core.address, 0, empty(weights()))


def test_a_stranger_gets_nothing(ends):
    core, _ = ends
    core.expose(0, weights())
    stranger = TcpTransfer(b"x" * 32, timeout_s=2.0)
    with pytest.raises(TransferError):
        stranger.pull(core.address, 0, empty(weights()))
    stranger.close()


def test_a_dead_source_is_named_with_its_address(ends):
    core, satellite = ends
    address = core.address
    core.close()
    with pytest.raises(TransferError, match=str(address[1])):
        satellite.pull(address, 0, empty(weights()))


def read_manifest(address):
    """A reader that took the manifest and stops there, holding its place."""
    channel = Channel(socket.create_connection(address, 5.0))
    channel.call(KEY)
    size = int.from_bytes(channel.receive_bytes(8), "big")
    return channel, json.loads(bytes(channel.receive_bytes(size)))


def test_withdrawing_waits_for_a_reader_to_acknowledge(ends):
    core, _ = ends
    core.expose(5, {"b": np.arange(4, dtype=np.float32)})
    channel, manifest = read_manifest(core.address)
    assert manifest["buffers"][0]["version"] == 5 and manifest["buffers"][0]["bytes"] == 16
    withdrawing = threading.Thread(target=core.withdraw)
    withdrawing.start()
    withdrawing.join(0.2)
    assert withdrawing.is_alive()
    channel.receive_bytes(16)
    channel.socket.sendall(b"\x06")
    withdrawing.join(5)
    assert not withdrawing.is_alive()
    channel.socket.close()


def test_withdrawing_cuts_off_a_frozen_reader():
    core = TcpTransfer(KEY, timeout_s=0.3)
    core.expose(0, {"a": np.zeros(50_000_000, np.uint8)})
    channel, _ = read_manifest(core.address)
    core.withdraw()
    assert not core._readers
    channel.socket.close()
    core.close()


def test_a_slow_reader_is_served_as_long_as_it_reads(monkeypatch):
    """Each piece comes well within the timeout, all of them take longer; `withdraw` waits for it too."""
    monkeypatch.setattr("gyre_trainer.wire.PIECE", 2**16)
    core = TcpTransfer(KEY, timeout_s=0.4)
    core.expose(0, {"a": np.zeros(40_000_000, np.uint8)})
    channel, _ = read_manifest(core.address)
    withdrawing = threading.Thread(target=core.withdraw)
    withdrawing.start()
    for _ in range(8):
        channel.receive_bytes(5_000_000)
        withdrawing.join(0.1)  # a pause, and still there
        assert withdrawing.is_alive()
    channel.socket.sendall(b"\x06")
    withdrawing.join(5)
    assert not withdrawing.is_alive() and not core._readers
    channel.socket.close()
    core.close()


def test_a_pull_tells_its_progress(ends):
    core, satellite = ends
    source, told = weights(), []
    core.expose(3, source)
    satellite.pull(core.address, 3, empty(source), lambda: told.append(1))
    assert len(told) >= len(source)


def test_damage_on_the_way_is_found(ends):
    core, satellite = ends
    source = weights()
    core.expose(0, source)
    source["b"][0] += 1.0  # changed though exposed: the checksum is that of the exposed bytes
    with pytest.raises(TransferError, match="b arrived damaged"):
        satellite.pull(core.address, 0, empty(source))


@settings(max_examples=20, deadline=None)
@given(arrays.arrays(st.sampled_from([np.float32, np.int8, np.float64]), arrays.array_shapes(max_dims=3)))
def test_any_array_arrives_as_it_was(array):
    core, satellite = TcpTransfer(KEY, timeout_s=2.0), TcpTransfer(KEY, timeout_s=2.0)
    try:
        target = {"x": np.zeros_like(array)}
        core.expose(0, {"x": array})
        satellite.pull(core.address, 0, target)
        assert target["x"].tobytes() == array.tobytes()
    finally:
        core.close()
        satellite.close()
