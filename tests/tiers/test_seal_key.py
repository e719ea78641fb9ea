"""Keyed seals: who may write to a shared place and lacks the key can make no row that passes."""

from __future__ import annotations

import logging
import os
import pickle
import random
import traceback
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import make_offload_key
from kvtier.residency import MissReason
from kvtier.testing.backend_suite import submit_rows
from kvtier.testing.faulty_backend import FaultyBackend
from kvtier.testing.memory_tier import MemoryBackend, MemoryServer, make_shared_tier
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, TierDriver, content, keys
from kvtier.tiers.base import BackendRow, Direction, TierResult
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.seal import SealKey, SealScope, read_seal_key, seal_of

blake3 = pytest.importorskip("blake3", reason="needs the package blake3: pip install blake3")
SECRET, OTHER = bytes(range(32)), bytes(32)
SCOPE = SealScope("model", 3, "suffix")
PATIENCE = 30.0


def row(number: int) -> BackendRow:
    key = make_offload_key(b"%032d" % number, 0)
    return BackendRow(key, (memoryview(bytearray(4096)),), number, SCOPE.number)


def filled(number: int) -> BackendRow:
    made = row(number)
    made.pieces[0][:] = random.Random(number).randbytes(4096)
    return made


def run(threads: IOThreads, direction: Direction, rows: list[BackendRow]) -> list[TierResult]:
    submit_rows(threads, direction, 1, rows, SCOPE)
    reports: list[TierResult] = []
    while sum(len(report.positions) for report in reports) < len(rows):
        assert threads.wait_any(PATIENCE)
        reports += threads.poll()
    return reports


class TestSeals:
    def test_the_keyed_seal_has_this_format(self) -> None:
        """The format, spelt out: a change of it is a new format."""
        made = filled(1)
        text = b"\x05\0\0\0model\x01\0\0\x003\x06\0\0\0suffix"
        assert text == SCOPE.text
        lengths = len(made.key).to_bytes(4, "little"), (4096).to_bytes(8, "little")
        data = text + lengths[0] + made.key + lengths[1] + made.pieces[0]
        expected = blake3.blake3(data, key=SECRET).digest()[:16]
        assert seal_of(SCOPE, made.key, made.pieces, SealKey(SECRET)) == expected

    def test_cuts_do_not_matter(self) -> None:
        made, key = filled(1), SealKey(SECRET)
        cut = (made.pieces[0][:100], made.pieces[0][100:])
        assert seal_of(SCOPE, made.key, cut, key) == seal_of(SCOPE, made.key, made.pieces, key)

    def test_all_of_it_counts(self) -> None:
        made, key = filled(1), SealKey(SECRET)
        flipped = filled(1)
        flipped.pieces[0][7] ^= 1
        seals = {
            seal_of(SCOPE, made.key, made.pieces, key),
            seal_of(SCOPE, made.key, made.pieces, SealKey(OTHER)),
            seal_of(SCOPE, made.key, made.pieces),
            seal_of(SCOPE, row(2).key, made.pieces, key),
            seal_of(SCOPE, made.key, (made.pieces[0][:-1],), key),
            seal_of(SCOPE, made.key, flipped.pieces, key),
            seal_of(SealScope("model", 4, "suffix"), made.key, made.pieces, key),
            seal_of(SealScope("other", 3, "suffix"), made.key, made.pieces, key),
        }
        assert len(seals) == 8
        assert {len(seal) for seal in seals} == {16}


class TestFleets:
    """Engines with other keys, or none, do not meet: neither finds, reads nor deletes what the other has."""

    def test_the_number_of_a_scope(self) -> None:
        """The format, spelt out: names on servers have it."""
        expected = int.from_bytes(blake3.blake3(SCOPE.text, key=SECRET).digest()[:8], "little")
        keyed = SealScope("model", 3, "suffix", SealKey(SECRET))
        assert keyed.number == expected
        assert keyed != SCOPE
        other = SealScope("model", 3, "suffix", SealKey(OTHER))
        assert len({scope.number for scope in (keyed, SCOPE, other)}) == 3
        assert keyed == SealScope("model", 3, "suffix", SealKey(SECRET))

    @pytest.mark.parametrize("other", [OTHER, None], ids=["another key", "no key"])
    @pytest.mark.parametrize("suffix", ["", "reset"])
    def test_they_do_not_meet(
        self, other: bytes | None, suffix: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = MemoryServer()
        keys_of = (SealKey(SECRET), None if other is None else SealKey(other))
        fleets = [open_tier(server, key, suffix) for key in keys_of]
        for version, fleet in enumerate(fleets):
            assert ask(fleet, 1) == [False]
            fleet.store(1, version=version)
        assert len(server.rows) == 2
        for version, fleet in enumerate(fleets):
            assert fleet.fetch(1) == {1: content(1, version)}
            assert fleet.tier.stats().failed_checks == 0
        assert not caplog.records
        partner = open_tier(server, SealKey(SECRET), suffix)
        assert ask(partner, 1) == [True]
        assert partner.fetch(1) == {1: content(1)}
        for driver in (*fleets, partner):
            assert driver.tier.close(PATIENCE)

    def test_forged_rows_under_our_name_log_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        server = MemoryServer()
        driver = open_tier(server, SealKey(SECRET))
        driver.store(1, 2)
        for name, (seal, payload) in list(server.rows.items()):
            server.rows[name] = seal, payload[::-1]
        assert driver.fetch(1, 2) == dict.fromkeys((1, 2), MissReason.FAILED)
        driver.wait(lambda: not server.rows)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "under one of our names" in caplog.text
        assert driver.tier.close(PATIENCE)


def open_tier(server: MemoryServer, key: SealKey | None, suffix: str = "") -> TierDriver:
    clock, faulty = ManualClock(1000.0), FaultyBackend(server)
    tier = make_shared_tier(ROW_BYTES, backend=faulty, namespace="suite", clock=clock, seal_key=key)
    if suffix:
        tier.reset(suffix)
    return TierDriver(tier, faulty, clock)


def ask(driver: TierDriver, number: int) -> list[bool | None]:
    driver.tier.ask(keys(number), driver.clock.now + 5)
    driver.wait(lambda: None not in driver.tier.lookup_many(keys(number)))
    return driver.tier.lookup_many(keys(number))


class TestForging:
    def forge_all(self) -> list[tuple[bytes, bytes]]:
        """What someone can put there who knows everything but the key, and has rows to copy from."""
        forged, key = filled(9), SealKey(SECRET)
        payload = bytes(forged.pieces[0])
        genuine = seal_of(SCOPE, row(1).key, filled(1).pieces, key)
        swapped = filled(2)
        old = SealScope("model", 2, "suffix")
        return [
            (seal_of(SCOPE, row(1).key, forged.pieces), payload),
            (seal_of(SCOPE, row(1).key, forged.pieces, SealKey(OTHER)), payload),
            (blake3.blake3(SCOPE.text + row(1).key + payload).digest()[:16], payload),
            (genuine, payload),
            (genuine[:8], payload),
            (b"", payload),
            (genuine + b"\0", bytes(filled(1).pieces[0])),
            (seal_of(SCOPE, swapped.key, swapped.pieces, key), bytes(swapped.pieces[0])),
            (seal_of(old, row(1).key, filled(1).pieces, key), bytes(filled(1).pieces[0])),
            (seal_of(SCOPE, row(1).key, filled(1).pieces), bytes(filled(1).pieces[0])),
        ]

    def test_nothing_forged_passes(self) -> None:
        backend = MemoryBackend()
        threads = IOThreads(backend, row_bytes=4096, threads=1, seal_key=SealKey(SECRET))
        try:
            for seal, payload in self.forge_all():
                backend.rows[backend.name(row(1))] = seal, bytearray(payload)
                (report,) = run(threads, Direction.PROMOTE, [row(1)])
                assert report.outcome is MissReason.FAILED
            run(threads, Direction.DEMOTE, [filled(1)])
            found = row(1)
            assert run(threads, Direction.PROMOTE, [found])[0].outcome is None
            assert found.pieces == filled(1).pieces
        finally:
            assert threads.close(PATIENCE)

    def test_without_a_key_anybody_can(self) -> None:
        """The negative control, and what the docs say of running without a key."""
        backend = MemoryBackend()
        threads = IOThreads(backend, row_bytes=4096, threads=1)
        try:
            forged = filled(9)
            seal = seal_of(SCOPE, row(1).key, forged.pieces)
            backend.rows[backend.name(row(1))] = seal, bytearray(forged.pieces[0])
            assert run(threads, Direction.PROMOTE, [row(1)])[0].outcome is None
        finally:
            assert threads.close(PATIENCE)

    def test_another_key_is_a_miss_and_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = MemoryBackend()
        ours = IOThreads(backend, row_bytes=4096, threads=1, name="valkey", seal_key=SealKey(SECRET))
        theirs = IOThreads(backend, row_bytes=4096, threads=1, seal_key=SealKey(OTHER))
        try:
            run(theirs, Direction.DEMOTE, [filled(number) for number in range(8)])
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    reports = run(ours, Direction.PROMOTE, [row(number) for number in range(8)])
                    assert {report.outcome for report in reports} == {MissReason.FAILED}
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "tier valkey" in caplog.text
        finally:
            assert ours.close(PATIENCE)
            assert theirs.close(PATIENCE)


class TestKeyFile:
    def write(self, folder: Path, data: bytes, mode: int = 0o600) -> str:
        path = folder / "seal.key"
        path.write_bytes(data)
        path.chmod(mode)
        return str(path)

    @pytest.mark.parametrize("data", [SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode() + b"\n"])
    def test_bytes_or_hex(self, tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
        made = filled(1)
        key = read_seal_key(self.write(tmp_path, data))
        expected = seal_of(SCOPE, made.key, made.pieces, SealKey(SECRET))
        assert seal_of(SCOPE, made.key, made.pieces, key) == expected
        assert not caplog.records

    @pytest.mark.parametrize(
        ("data", "got"),
        [
            (b"", "got 0 hex digits"),
            (SECRET[:31], "got 31 bytes that are not hex digits"),
            (SECRET + b"\n", "got 33 bytes that are not hex digits"),
            (SECRET.hex().encode()[:-2], "got 62 hex digits"),
            (b"\xff" * 64, "got 64 bytes that are not hex digits"),
        ],
    )
    def test_something_else(self, tmp_path: Path, data: bytes, got: str) -> None:
        expected = "^seal_key_file: expected 32 bytes or 64 hex digits"
        with pytest.raises(ConfigError, match=f"{expected} .*{got}$"):
            read_seal_key(self.write(tmp_path, data))

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            read_seal_key(str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="Is a directory"):
            read_seal_key(str(tmp_path))

    def test_a_pipe_that_nobody_writes_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match=r"expected 32 bytes or 64 hex digits in .*pipe, got 0"):
            read_seal_key(str(tmp_path / "pipe"))

    def test_a_file_for_all_is_warned_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        read_seal_key(self.write(tmp_path, SECRET, 0o644))
        assert "every user of this machine may read" in caplog.text

    def test_the_secret_is_not_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        secret = b"hush" * 8
        key = read_seal_key(self.write(tmp_path, secret, 0o666))
        told = [repr(key), str(key), caplog.text]
        for data in (secret + b"hush", secret[:-1]):
            with pytest.raises(ConfigError) as raised:
                read_seal_key(self.write(tmp_path, data))
            told.append("".join(traceback.format_exception(raised.value)))
        with pytest.raises(TypeError, match="not pickled") as refused:
            pickle.dumps(key)
        told.append(str(refused.value))
        assert not [text for text in told if "hush" in text or secret.hex() in text]

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "blake3", None)
        with pytest.raises(ConfigError, match="pip install blake3"):
            SealKey(SECRET)
