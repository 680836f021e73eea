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


def test_larger_integers_are_read_as_every_reader_of_numbers_does():
    body = json_object({}, b'{"seed": 18446744073709551616}')
    assert chat.parse({**CHAT, **body}).asked == {"seed": 2.0**64}


@pytest.mark.parametrize(("value", "limit"), [("5", 5), ("5.0", 5), ("5e0", 5), ("1e300", int(1e300))])
def test_an_integer_may_be_written_with_a_point(value, limit):
    body = json_object({}, b'{"max_tokens": %s}' % value.encode())
    request = chat.parse({**CHAT, **body})
    assert request.max_tokens == limit and type(request.max_tokens) is int


@pytest.mark.parametrize("value", [5.5, "5", True, [5]])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(BadRequest, match="field 'max_tokens' must be an integer"):
        chat.parse({**CHAT, "max_tokens": value})


def test_a_body_that_an_upgrade_cost_is_missed_by_its_cause():
    """Clients of Java ask for h2c unless told not to."""
    with pytest.raises(BadRequest, match="Upgrade: h2c"):
        json_object({b"upgrade": b"h2c"}, b"")
