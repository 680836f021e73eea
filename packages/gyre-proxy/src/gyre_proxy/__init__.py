"""Black-box token-in/token-out gateway between agent harnesses and SGLang-compatible engines"""
