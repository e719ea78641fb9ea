"""Encrypted, authenticated publishing: who has the right keys reads, nobody else does."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
import zmq.utils.z85
from tests.unit.event_kit import Client, batch, publisher, receive, stored, wait_until

from kvtier.errors import ConfigError, InputError
from kvtier.events import CurveClient, CurveServer, make_keys
from kvtier.events.curve import Gate

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, "server")
    make_keys(tmp_path / "clients", "friend")
    make_keys(tmp_path / "strangers", "stranger")
    return tmp_path


def friend(keys: Path) -> CurveClient:
    return CurveClient(str(keys / "clients" / "friend.key_secret"), str(keys / "server.key"))


def answers(sock: zmq.Socket[bytes], wait: int) -> bool:
    sock.send_multipart([b"", bytes(8)])
    return bool(sock.poll(wait))


def test_keys_are_files_that_only_the_owner_reads(keys: Path) -> None:
    assert stat.S_IMODE((keys / "server.key_secret").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="exists"):
        make_keys(keys, "server")


@pytest.mark.parametrize("listed", [True, False])
def test_a_friend_reads_both_sockets(client: Client, keys: Path, listed: bool) -> None:
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients") if listed else None)
    with publisher(curve=curve) as made:
        made.publish(batch(stored([1])))
        dealer = client.open(zmq.DEALER, made.replay_endpoint, friend(keys))
        assert answers(dealer, 10_000)
        sub = client.open(zmq.SUB, made.endpoint, friend(keys))
        sub.subscribe(b"")
        wait_until(lambda: (made.publish(batch()), sub.poll(5))[1], "the subscription")
        assert len(receive(sub)) == 3


def test_strangers_and_plain_clients_do_not_come_in(client: Client, keys: Path) -> None:
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients"))
    stranger = CurveClient(str(keys / "strangers" / "stranger.key_secret"), str(keys / "server.key"))
    wrong_server = CurveClient(
        str(keys / "clients" / "friend.key_secret"), str(keys / "clients" / "friend.key")
    )
    with publisher(curve=curve) as made:
        made.publish(batch(stored([1])))
        for identity in (stranger, wrong_server, None):
            assert not answers(client.open(zmq.DEALER, made.replay_endpoint, identity, linger=0), 100)
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys)), 10_000)
        assert made.stats().denied >= 1


def test_a_key_can_be_added_while_running(client: Client, keys: Path) -> None:
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients"))
    late = CurveClient(
        str(keys / "strangers" / "stranger.key_secret"), (keys / "server.key").read_text().split('"')[1]
    )
    with publisher(curve=curve) as made:
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys)), 10_000)
        (keys / "strangers" / "stranger.key").rename(keys / "clients" / "stranger.key")
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, late), 10_000)


def test_settings_that_cannot_be(keys: Path) -> None:
    public = CurveServer(str(keys / "server.key"))
    for curve, problem in ((public, "secret key file"), (CurveServer(str(keys / "none")), "cannot read")):
        with pytest.raises(InputError, match=problem), publisher(curve=curve):
            pass
    with (
        pytest.raises(ConfigError, match="clients_dir"),
        publisher(curve=CurveServer(str(keys / "server.key_secret"), "/none")),
    ):
        pass


def test_a_key_that_is_overwritten_is_revoked(client: Client, keys: Path) -> None:
    """Only the folder's own time was looked at, which a file that is written again does not change."""
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients"))
    with publisher(curve=curve) as made:
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys)), 10_000)
        (keys / "clients" / "friend.key").write_text((keys / "strangers" / "stranger.key").read_text())
        assert not answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys), linger=0), 300)
        wait_until(lambda: made.stats().denied >= 1, "the refusal")


def test_keys_that_stay_are_read_once(client: Client, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.events.curve._SETTLED_NS", -1)
    made = Gate(client.context, str(keys / "clients"))
    key = zmq.utils.z85.decode(zmq.auth.load_certificate(keys / "clients" / "friend.key")[0])
    assert made._is_allowed(key)
    monkeypatch.setattr(zmq.auth, "load_certificates", None)
    assert made._is_allowed(key)
    made.close()


def test_keys_that_cannot_be_read_are_one_line_a_minute(
    client: Client, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connect of each client was a line."""
    made = Gate(client.context, str(keys / "clients"))
    shutil.rmtree(keys / "clients")
    assert not any(made._is_allowed(b"k" * 32) for _ in range(20))
    made.close()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "text", ["", "metadata\n", 'curve\n    public-key = "x8/', 'curve\n    public-key = "x8"\n']
)
def test_a_half_written_key_refuses_its_own_client_only(
    client: Client, keys: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients"))
    late = CurveClient(str(keys / "strangers" / "stranger.key_secret"), str(keys / "server.key"))
    (keys / "clients" / "late.key").write_text(text)
    with publisher(curve=curve) as made:
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys)), 10_000)
        assert not answers(client.open(zmq.DEALER, made.replay_endpoint, late, linger=0), 100)
        (keys / "strangers" / "stranger.key").replace(keys / "clients" / "late.key")
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, late), 10_000)
    assert "late.key: skipped" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder"])
def test_an_odd_file_among_the_keys_refuses_nobody_else(client: Client, keys: Path, kind: str) -> None:
    """A pipe stopped the publisher's thread, and a link to itself refused everybody."""
    odd = keys / "clients" / "odd.key"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "loop":
        odd.symlink_to(odd)
    else:
        odd.mkdir()
    curve = CurveServer(str(keys / "server.key_secret"), str(keys / "clients"))
    with publisher(curve=curve) as made:
        assert answers(client.open(zmq.DEALER, made.replay_endpoint, friend(keys)), 10_000)
