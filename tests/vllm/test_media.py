"""Images: KV of an image whose name is not a digest of its content never leaves the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.models import save_blip2
from tests.vllm.test_tiers import wait_open

PROMPT = make_prompt(0, 130)
COUNTED = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
"""Settings with which vLLM names images by a counter."""


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blip2(tmp_path_factory.mktemp("blip2"))


def look(engine: Engine, color: str, **more: Any) -> tuple[list[int], int]:
    """Return the tokens that follow the prompt with an image of one color, and how many were cached."""
    from PIL import Image

    image = Image.new("RGB", (28, 28), color)
    prompt = {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": image}} | more
    (done,) = engine.llm.generate([prompt], engine.params(8), use_tqdm=False)
    return list(done.outputs[0].token_ids), done.num_cached_tokens


def over_disk(folder: Path, blip2: Path, **options: Any) -> Any:
    settings = {"tiers": [{"disk": {"path": str(folder), "capacity": "64MiB"}}]}
    return vllm_engine(blip2, settings, skip_tokenizer_init=False, **options)


@pytest.fixture(scope="module")
def expected(blip2: Path) -> dict[str, list[int]]:
    with vllm_engine(blip2, skip_tokenizer_init=False) as plain:
        answers = {color: look(plain, color)[0] for color in ("red", "blue")}
    assert answers["red"] != answers["blue"], "else nothing is tested"
    return answers


@pytest.mark.parametrize("name", ["counted", "given"])
def test_another_image_of_the_same_name_is_computed_after_a_restart(
    tmp_path: Path, blip2: Path, expected: dict[str, list[int]], name: str
) -> None:
    options: dict[str, Any] = COUNTED if name == "counted" else {}
    more = {} if name == "counted" else {"multi_modal_uuids": {"image": ["picture"]}}
    with over_disk(tmp_path, blip2, **options) as engine:
        wait_open(engine)
        assert look(engine, "red", **more)[0] == expected["red"]
    with over_disk(tmp_path, blip2, **options) as engine:
        wait_open(engine)
        assert look(engine, "blue", **more) == (expected["blue"], 0)


def test_an_image_that_is_named_by_its_content_comes_back_after_a_restart(
    tmp_path: Path, blip2: Path, expected: dict[str, list[int]]
) -> None:
    with over_disk(tmp_path, blip2) as engine:
        wait_open(engine)
        look(engine, "red")
    with over_disk(tmp_path, blip2) as engine:
        wait_open(engine)
        assert look(engine, "blue")[0] == expected["blue"]
        assert look(engine, "red") == (expected["red"], 160)


DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("name", "settings", "is_content"),
    [
        (DIGEST, {}, True),
        (DIGEST, {"mm_processor_cache_gb": 0}, True),
        (DIGEST, {"enable_prefix_caching": False}, True),
        (
            DIGEST,
            COUNTED,
            False,
        ),  # a client's name, or the digest of a counter and of a processor's settings
        (DIGEST * 2, {}, False),
        (DIGEST * 2, {"mm_hasher_algorithm": "sha512"}, True),
        (DIGEST, {"mm_hasher_algorithm": "sha512"}, False),
        (DIGEST.upper(), {}, False),
        (DIGEST[1:], {}, False),
        (f"adapter:{DIGEST}", {}, False),
        (f"{DIGEST}\n", {}, False),
        ("renderer0-mm-0-image-0", {}, False),
    ],
)
def test_only_a_digest_that_vllm_may_have_computed_names_an_image_by_its_content(
    name: str, settings: dict[str, Any], is_content: bool
) -> None:
    from kvtier.integrations.vllm.translate import describer

    media = SimpleNamespace(mm_processor_cache_gb=4, mm_hasher_algorithm="blake3")
    cache = SimpleNamespace(enable_prefix_caching=True)
    for key, value in settings.items():
        setattr(cache if hasattr(cache, key) else media, key, value)
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=media), cache_config=cache)
    for images, expected in (([], True), ([name], is_content), ([name, "picture"], False)):
        features = [SimpleNamespace(identifier=image) for image in images]
        request = SimpleNamespace(lora_request=None, mm_features=features, all_token_ids=[])
        assert describer(config)(request, 0, 0, 16).keyed_by_content is expected
