from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import keys
from kvtier.errors import InputError
from kvtier.keys import (
    BlockHash,
    ExtraKey,
    MultiModalItem,
    OffloadKey,
    embeds_key,
    extra_keys_of,
    fingerprint,
    get_offload_block_hash,
    get_offload_group_idx,
    hash_blocks,
    hash_to_u64,
    lora_key,
    make_offload_key,
    make_offload_keys,
    media_key,
    root_hash,
    salt_key,
)

TOKEN = st.integers(0, 2**32 - 1)
EXTRA = st.one_of(
    st.builds(lora_key, st.text()),
    st.builds(salt_key, st.text()),
    st.builds(media_key, st.text(), st.integers(-(2**31), 2**31)),
    st.builds(embeds_key, st.binary()),
)


def plain_formula(tokens: list[int], block_size: int, seed: str = "") -> list[bytes]:
    """Return the hashes of plain blocks, written down a second time from the module's docstring."""
    digest = hashlib.blake2b(seed.encode(), digest_size=32, person=b"kvtier root").digest()
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        message = digest + struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        digest = hashlib.blake2b(message, digest_size=32, person=b"kvtier block").digest()
        hashes.append(digest)
    return hashes


@pytest.fixture(params=["python", "c"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with each of the two that chain plain blocks."""
    if request.param == "c" and keys.HASHED_BY != "c":
        pytest.skip("kvtier.native._chain is not compiled here (no C compiler when kvtier was installed)")
    if request.param == "python":
        monkeypatch.setattr(keys, "_chain", keys._chain_python)
    return request.param


class TestGolden:
    """These bytes are on disks and in other processes: a change here is a new FORMAT_VERSION."""

    def test_root(self) -> None:
        assert root_hash().hex() == "7e49d52c4f4f5fa2965a8299d7b3c4cb81e3ac691a8f4f2f0e79d3381e6e5f91"
        assert (
            root_hash("tenant").hex() == "4eff4489a803ab0c65bd8aa8e6ad6fd40b33eb33e8c553ac61d9f590c3807988"
        )

    def test_plain_blocks(self, implementation: str) -> None:
        hashes = [h.hex() for h in hash_blocks(list(range(32)), 16)]
        assert hashes == [
            "c0556cc2ea6c9ee9a056d3180d9ad9c88be7600dcdf9b55b254e9445202ac2c1",
            "9c849aeb3c6a3737a83c74fb48a57cebc566d9e82db62428d3861d7fa3e1b5f3",
        ]

    def test_largest_token_and_seed(self, implementation: str) -> None:
        assert hash_blocks([2**32 - 1, 0, 1], 3, seed="tenant")[0].hex() == (
            "f42ed733f6430e18cbbb0d5a14e2824090392eec6caa5103aade8936fb768a80"
        )

    def test_extra_keys(self, implementation: str) -> None:
        extras: dict[int, list[ExtraKey]] = {
            0: [salt_key("tenantA"), lora_key("sql")],
            2: [media_key("img-7", -5), embeds_key(b"\x01\x02")],
        }
        assert [h.hex()[:16] for h in hash_blocks(list(range(16)), 4, extra_keys=extras)] == [
            "37bc0d5c747bdf3a",
            "856cf87b417f21c8",
            "232a1087ada2c498",
            "58a531051c5358d0",
        ]

    def test_extra_keys_by_hand(self) -> None:
        salted = hash_blocks([1, 2], 2, extra_keys={0: [salt_key("s")]})
        message = root_hash() + struct.pack("<I2I", 2, 1, 2) + b"\x02" + struct.pack("<I", 1) + b"s"
        assert salted == [hashlib.blake2b(message, digest_size=32, person=b"kvtier block+").digest()]

    def test_fingerprint(self) -> None:
        fields = {
            "weights": [["a", 1]],
            "dtype": "bf16",
            "kv_layout": "x",
            "groups": [[16, 2]],
            "parallelism": {"tp": 1},
        }
        assert fingerprint(**fields) == "55bd086e218c44dac25e249c970ef582f37779306d24fc4f73affc5fc37374d3"


@pytest.mark.parametrize("block_size", [1, 2, 16, 24, 25, 56, 57, 128])
def test_matches_the_formula(implementation: str, block_size: int) -> None:
    tokens = [(i * 2654435761) % 2**32 for i in range(block_size * 3 + 1)]
    assert hash_blocks(tokens, block_size, seed="x") == plain_formula(tokens, block_size, "x")


@given(st.lists(TOKEN, max_size=200), st.integers(1, 40))
def test_both_implementations_agree(tokens: list[int], block_size: int) -> None:
    assert keys._chain(tokens, block_size, root_hash()) == keys._chain_python(
        tokens, block_size, root_hash()
    )


@given(st.lists(TOKEN, max_size=60), st.integers(1, 7), st.integers(0, 60), st.lists(EXTRA, max_size=2))
def test_extending_equals_hashing_at_once(
    tokens: list[int], size: int, cut: int, extras: list[ExtraKey]
) -> None:
    whole = hash_blocks(tokens, size, extra_keys={0: extras, 3: extras})
    done = min(cut, len(whole))
    rest = {position - done: extras for position in (0, 3) if position >= done}
    parent = whole[done - 1] if done else None
    assert hash_blocks(tokens[done * size :], size, parent=parent, extra_keys=rest) == whole[done:]


def test_only_full_blocks(implementation: str) -> None:
    assert hash_blocks([], 4) == []
    assert hash_blocks([1, 2, 3], 4) == []
    assert hash_blocks([1, 2, 3, 4, 5], 4) == hash_blocks([1, 2, 3, 4], 4)


def test_takes_any_sequence_of_integers(implementation: str) -> None:
    expected = hash_blocks([7, 8, 9, 10], 2)
    for tokens in (
        (7, 8, 9, 10),
        range(7, 11),
        np.arange(7, 11),
        np.arange(7, 11, dtype=np.uint16),
        list(np.arange(7, 11)),
    ):
        assert hash_blocks(tokens, 2) == expected


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, -(2**64), 1.5, "a", None])
def test_refuses_what_is_no_token(implementation: str, bad: object) -> None:
    with pytest.raises(InputError, match=r"tokens: expected ids from 0 to 2\*\*32 - 1"):
        hash_blocks([1, bad], 2)  # type: ignore[list-item]
    with pytest.raises(InputError, match="tokens"):
        hash_blocks([1, bad], 2, extra_keys={0: [salt_key("s")]})  # type: ignore[list-item]


def test_refuses_misuse() -> None:
    with pytest.raises(InputError, match="block_size: expected at least 1 token, got 0"):
        hash_blocks([1], 0)
    with pytest.raises(InputError, match="parent: expected a block hash of 32 bytes, got 1 bytes"):
        hash_blocks([1], 1, parent=BlockHash(b"1"))
    with pytest.raises(InputError, match="extra_keys: expected positions from 0, got -1"):
        hash_blocks([1], 1, extra_keys={-1: [salt_key("lost")]})


class TestNoCollisions:
    def test_every_input_counts(self) -> None:
        """One hash for each way to differ; a collision would merge two."""
        extras: list[list[ExtraKey]] = [
            [],
            [lora_key("a")],
            [salt_key("a")],
            [embeds_key(b"a")],
            [lora_key("")],
            [salt_key("")],
            [lora_key("a"), salt_key("b")],
            [lora_key("b"), salt_key("a")],
            [lora_key("ab")],
            [salt_key("ab")],
            [salt_key("a\x02\x01\x00\x00\x00b")],
            [salt_key("a"), salt_key("b")],
            [media_key("a", 0)],
            [media_key("a", 1)],
            [media_key("b", 0)],
            [media_key("a", 0), media_key("a", 1)],
        ]
        blocks = [[1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [258]]
        parents = [None, *hash_blocks([5, 6], 1)]
        seen = [
            hash_blocks(block, len(block), parent=parent, extra_keys={0: extra}, seed=seed)[0]
            for block, parent, extra in itertools.product(blocks, parents, extras)
            for seed in (["", "s"] if parent is None else [""])
        ]
        assert len(set(seen)) == len(seen)

    @given(st.sets(EXTRA), st.sets(EXTRA))
    def test_extra_keys_are_a_set(self, left: set[ExtraKey], right: set[ExtraKey]) -> None:
        one, other = (hash_blocks([1], 1, extra_keys={0: extras}) for extras in (left, right))
        assert (one == other) == (left == right)

    @given(st.lists(EXTRA, min_size=1, max_size=3), st.lists(TOKEN, max_size=8))
    def test_a_block_with_extras_is_never_a_plain_one(
        self, extras: list[ExtraKey], tokens: list[int]
    ) -> None:
        """Not even where the plain block's tokens spell the bytes of the other's extra keys."""
        payload = keys._encode_extras(extras)
        spelled = [
            len(tokens),
            *tokens,
            *np.frombuffer(payload + bytes(-len(payload) % 4), dtype="<u4").tolist(),
        ]
        plain = hash_blocks(spelled, len(spelled))
        if tokens:
            assert hash_blocks(tokens, len(tokens), extra_keys={0: extras}) != plain

    def test_no_extra_keys_are_a_plain_block(self) -> None:
        assert hash_blocks([1, 2], 1, extra_keys={0: [], 1: ()}) == hash_blocks([1, 2], 1)

    def test_order_and_repetition_do_not_matter(self) -> None:
        one = hash_blocks([1], 1, extra_keys={0: [lora_key("a"), salt_key("b")]})
        assert one == hash_blocks([1], 1, extra_keys={0: [salt_key("b"), lora_key("a"), salt_key("b")]})

    def test_an_early_change_reaches_every_later_block(self) -> None:
        tokens = list(range(40))
        changes = [
            hash_blocks(tokens, 4),
            hash_blocks([99, *tokens[1:]], 4),
            hash_blocks(tokens, 4, seed="s"),
            hash_blocks(tokens, 4, extra_keys={0: [salt_key("s")]}),
        ]
        for one, other in itertools.combinations(changes, 2):
            assert set(one).isdisjoint(other)


class TestExtraKeysOf:
    def test_lora_and_salt_mark_the_first_block_only(self) -> None:
        assert extra_keys_of(3, 4, lora="l", salt="s") == {0: [lora_key("l"), salt_key("s")]}
        assert extra_keys_of(3, 4, first_block=1, lora="l", salt="s") == {}
        assert extra_keys_of(3, 4) == {}
        assert extra_keys_of(0, 4, salt="s") == {}

    def test_an_item_marks_the_blocks_it_touches(self) -> None:
        # tokens   0 1 2 3 | 4 5 6 7 | 8 9 10 11
        # image          3   4 5 6 7   8
        marks = extra_keys_of(3, 4, items=[MultiModalItem("image", 3, 6)])
        assert marks == {
            0: [media_key("image", 3)],
            1: [media_key("image", -1)],
            2: [media_key("image", -5)],
        }
        assert extra_keys_of(3, 4, items=[MultiModalItem("image", 4, 4)]) == {1: [media_key("image", 0)]}

    @given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 40), st.integers(1, 40))
    def test_parts_agree_with_the_whole(self, block_size: int, first: int, start: int, length: int) -> None:
        items = [MultiModalItem("x", start, length)]
        whole = extra_keys_of(20, block_size, lora="l", items=items)
        part = extra_keys_of(20 - first, block_size, first_block=first, lora="l", items=items)
        assert part == {block - first: marks for block, marks in whole.items() if block >= first}


class TestOffloadKey:
    def test_layout(self) -> None:
        key = make_offload_key(b"1", 258)
        assert key == b"1\x00\x00\x01\x02"
        assert get_offload_block_hash(key) == b"1"
        assert get_offload_group_idx(key) == 258

    @pytest.mark.parametrize("group", [-1, 2**32])
    def test_refuses_a_group_that_does_not_fit(self, group: int) -> None:
        with pytest.raises(OverflowError):
            make_offload_key(b"1", group)
        with pytest.raises(OverflowError):
            make_offload_keys([b"1"], group)

    @given(st.lists(st.binary(max_size=40)), st.integers(0, 2**32 - 1))
    def test_many_equal_one_by_one(self, hashes: list[bytes], group: int) -> None:
        made = make_offload_keys(hashes, group)
        assert made == [make_offload_key(h, group) for h in hashes]
        assert [get_offload_block_hash(key) for key in made] == hashes
        assert {get_offload_group_idx(key) for key in made} <= {group}

    def test_is_plain_bytes(self) -> None:
        assert type(OffloadKey(b"")) is type(make_offload_key(b"", 0)) is bytes

    def test_low_64_bits(self) -> None:
        assert hash_to_u64(bytes(24) + b"\xff" + bytes(6) + b"\x01") == 0xFF00000000000001
        assert hash_to_u64(b"\x01\x02") == 0x0102


FIELDS = {
    "weights": [["model.safetensors", 10, "aa"]],
    "dtype": "bfloat16",
    "kv_layout": "layers first",
    "groups": [{"block_size": 16, "layers": ["0"]}],
    "parallelism": {"tp": 1},
    "lora": None,
    "seed": "",
}


class TestFingerprint:
    def test_equal_fields_in_any_order(self) -> None:
        assert fingerprint(**FIELDS) == fingerprint(**dict(reversed(FIELDS.items())))

    @pytest.mark.parametrize("name", FIELDS)
    def test_every_field_counts(self, name: str) -> None:
        assert fingerprint(**FIELDS | {name: "other"}) != fingerprint(**FIELDS)

    def test_more_counts_too(self) -> None:
        prints = {
            fingerprint(**FIELDS, **more) for more in ({}, {"isa": "amx"}, {"isa": "vec"}, {"asi": "vec"})
        }
        assert len(prints) == 4

    def test_the_format_version_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fingerprint(**FIELDS)
        monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
        assert fingerprint(**FIELDS) != before

    @pytest.mark.parametrize("bad", [b"bytes", float("nan"), object()])
    def test_refuses_what_is_not_json(self, bad: object) -> None:
        with pytest.raises(InputError, match="fingerprint: expected JSON values"):
            fingerprint(**FIELDS | {"lora": bad})
