"""Black-box token-in/token-out gateway between agent harnesses and SGLang-compatible engines."""

from gyre_proxy.errors import ProxyError, SettingsError, TokenizerError
from gyre_proxy.service import serve
from gyre_proxy.settings import Settings

__all__ = ["ProxyError", "Settings", "SettingsError", "TokenizerError", "serve"]
