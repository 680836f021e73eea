"""Bytes of requests that are JSON objects, and those that are not."""

import pytest
from gyre_proxy.bodies import json_object
from gyre_proxy.dialects import chat
from gyre_proxy.errors import BadRequest
from protocol_bodies import CHAT


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1e999}', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[" * 5000, "nests deeper"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nests deeper"),
    ],
)
def test_what_is_no_json_object_is_refused_in_one_line(body, words):
    with pytest.raises(BadRequest, match=words) as caught:
        json_object({}, body)
    assert str(caught.value).isprintable()


def test_of_a_repeated_key_the_last_counts():
    assert json_object({}, b'{"a": 1, "b": 2, "a": [3]}') == {"a": [3], "b": 2}


def test_compressed_bodies_are_refused_by_the_name_of_their_encoding():
    with pytest.raises(BadRequest, match="'zstd' is not supported"):
        json_object({b"content-encoding": b"zstd"}, b"\x28\xb5\x2f\xfd")


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**64 - 1])
def test_integers_of_64_bits_are_kept(seed):
    assert chat.parse({**CHAT, "seed": seed}).asked == {"seed": seed}


def test_larger_integers_are_no_integers():
    body = json_object({}, b'{"messages": [], "seed": 18446744073709551616}')
    with pytest.raises(BadRequest, match="field 'seed' must be an integer"):
        chat.parse(body)
