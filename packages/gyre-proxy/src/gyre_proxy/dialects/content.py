"""Owns images in requests: a line of text stands for each, since the model reads text only. Pure.

Invariant: the same image gives the same line in every protocol, and the line does not grow with the image.
"""

from gyre_proxy.dialects.checks import BadField

SHOWN, TYPE_SHOWN = 2000, 100
"""Characters of an image's address, and of its media type, that the model sees."""


def image_url(value: object) -> None:
    """The check of an image's address."""
    if type(value) is not str:
        raise BadField("must be a string")
    if value.startswith("data:") and "," not in value:
        raise BadField("is a data: URL without data")


def image(what: str) -> str:
    return f"[image {what[:SHOWN]}: this model reads text only]"


def base64_image(media_type: str, data: str) -> str:
    """The line for image data in base64; its size is that of the decoded data."""
    size = len(data) * 3 // 4 - data[-2:].count("=")
    return image(f"{media_type[:TYPE_SHOWN]}, {max(size, 0)} bytes")


def url_image(url: str) -> str:
    """The line for an image by address; a data: URL holds the image itself."""
    if not url.startswith("data:"):
        return image(url)
    head, _, data = url[len("data:") :].partition(",")
    media_type, _, encoding = head.partition(";")
    if encoding.endswith("base64"):
        return base64_image(media_type, data)
    return image(f"{media_type[:TYPE_SHOWN]}, {len(data) - 2 * data.count('%')} bytes")
